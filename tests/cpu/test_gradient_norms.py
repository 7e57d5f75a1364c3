"""`clip_grad_norm_` with any norm, over any layout: torch's own on the unsharded model."""

import math

from tests.cpu import gradient_norms

KINDS = [1, 2.0, 3.0, 0.5, math.inf, "inf"]


def test_every_norm_is_that_of_the_unsharded_gradients(ranks):
    for rank in ranks(2).run(gradient_norms.beside_torch, KINDS):
        assert rank.keys() == gradient_norms.PLANS.keys()
        for plan, found in rank.items():
            for kind, (norm, clipped) in zip(KINDS, found, strict=True):
                assert norm < 1e-5, (plan, kind)
                assert clipped < 1e-6, (plan, kind)


def test_what_is_no_norm_is_refused(ranks):
    for found in ranks(2).run(gradient_norms.refusals):
        assert "norm_type must be a number above 0 or inf, not 0.0" in found["zero"]
        assert "not 'two'" in found["text"]
        assert "pass state.parameters()" in found["none"]
        assert found["not finite"].startswith("RuntimeError")
