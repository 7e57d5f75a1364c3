"""Initial values are made in shards: of two processes, none ever holds the whole model."""

import json
import os
import socket
import subprocess
import sys

import pytest


@pytest.mark.full
def test_no_process_ever_holds_the_whole_model():
    """Each has four of eight devices, so half of the model is its own. Generating a value takes some memory more."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "tests.jax.init_memory", port]
    ranks = [subprocess.Popen([*command, str(r)], env=kept, stdout=subprocess.PIPE, text=True) for r in range(2)]
    for rank in ranks:
        text, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0
        found = json.loads(text.splitlines()[-1])
        assert found["device"] == pytest.approx(found["model"] / 8)
        assert 0.5 * found["model"] <= found["most"] < 0.95 * found["model"]
