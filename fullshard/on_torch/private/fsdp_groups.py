"""FSDP's parameter groups: all private APIs of torch's FSDP that the engine uses. The others are in `torch_internals`."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Size, Tensor, _foreach_copy_, dtype, empty, no_grad
from torch.autograd import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as _TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState as _ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn import Module, Parameter
from torch.profiler import record_function

from fullshard.on_torch.private.torch_internals import dtensor_like

__all__ = [
    "ComputedGradients",
    "FSDPParamGroup",
    "GatherGroup",
    "Owner",
    "can_replace_collectives",
    "forget_unfinished",
    "gather_by",
    "gather_group",
    "group_label",
    "replace_collectives",
]


Owner = tuple[Module, str]  # of a parameter: its module, and its name there


class GatherGroup:
    """FSDP's parameter group of one unit, with what offloading needs, and without copies that a group of one rank can spare."""

    def __init__(self, group: Any):
        self.group = group

    def reduce_into(self, kind: dtype) -> None:
        """Keep gradients in this dtype after the reduction, instead of casting them to the shards' dtype. FSDP resets this
        when it initialises lazily, so it must be called before every gather."""
        self.group._orig_dtype = kind

    def gather_scalars(self, owners: Collection[Owner]) -> None:
        """Gather the parameters of these owners, vectors of one element, as scalars."""
        for p in self.group.fsdp_params:
            if (p._module_info.module, p._module_info.param_name) in owners:
                p._orig_size, p._contiguous_orig_stride = Size(()), ()
                p._get_grad_inner_tensor = partial(_gradient_as_vector, p._get_grad_inner_tensor)

    def around_gather(self, before: Callable[[], None], at_copy: Callable[[], None], after: Callable[[], None]) -> None:
        """Call `before` before a gather is issued, `at_copy` before the gathered parameters are copied out, and `after` when
        that copy is queued. In a group of one rank, FSDP reads the shard at the time of the copy-out."""
        group, unshard, wait = self.group, self.group.unshard, self.group.wait_for_unshard

        def issue(async_op: bool = False) -> None:
            if group.is_sharded and group._all_gather_result is None:
                before()
            unshard(async_op)

        def copy_out() -> None:
            if group._all_gather_result is None:
                return wait()
            at_copy()
            wait()
            after()

        group.unshard, group.wait_for_unshard = issue, copy_out

    def before_use(self, call: Callable[..., None]) -> Callable[[], None]:
        """Call `call(backward=…)` before the unit's forward and its backward. Returns a function that ends this."""
        group, before = self.group, dict(vars(self.group))
        plain = {name: getattr(group, name) for name in ("pre_forward", "pre_backward")}

        def first(name: str, *arguments: Any, **more: Any) -> Any:
            call(backward=name == "pre_backward")
            return plain[name](*arguments, **more)

        def end() -> None:
            for name in plain:
                if name in before:
                    setattr(group, name, before[name])
                else:
                    delattr(group, name)

        for name in plain:
            setattr(group, name, partial(first, name))
        return end

    def before_collectives(self, call: Callable[..., None]) -> None:
        """Call `call(backward=…)` before the unit is gathered from other ranks, and before its gradients are reduced."""
        group, mesh, unshard, reduce = self.group, self.group.mesh_info, self.group.unshard, self.group.post_backward
        shards, copies = getattr(mesh, "shard_mesh_size", 1), getattr(mesh, "replicate_mesh_size", 1)

        def issue(async_op: bool = False) -> None:
            if group.is_sharded and group._all_gather_result is None:
                call(backward=group._training_state is not _TrainingState.FORWARD)
            unshard(async_op)

        def post_backward(*unused: Any) -> None:
            if group.reduce_grads and any(p.sharded_param.requires_grad for p in group.fsdp_params):
                call(backward=True)
            reduce(*unused)

        if shards > 1:
            group.unshard = issue
        if shards * copies > 1:
            group.post_backward = post_backward

    def wrap_collectives(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap the functions in which the unit issues its collectives or waits for them."""
        for name in ("pre_forward", "pre_backward", "post_backward", "finalize_backward"):
            setattr(self.group, name, wrap(getattr(self.group, name)))

    def copy_once(self, computed: "ComputedGradients") -> None:
        """If the shard is the whole, gather by one cast, and take gradients as they are; FSDP makes two passes for each. With
        copies on other ranks, reduce them in place."""
        group, mesh = self.group, self.group.mesh_info
        if getattr(mesh, "shard_mesh_size", 1) > 1:
            return
        if hasattr(group, "_all_gather_output"):  # else this torch has no path of its own for one rank
            group.wait_for_unshard = partial(_gather_alone, group, group.wait_for_unshard, _cast_shards)
        reduce = group.post_backward
        if getattr(mesh, "replicate_mesh_size", 1) == 1:
            group.post_backward = partial(_take_gradients, group, reduce, computed)
        elif can_replace_collectives():
            reduction = _InPlaceReduction()

            def begin(*unused: Any) -> None:
                reduction.input = None
                reduce(*unused)

            group._reduce_scatter_comm, group.post_backward = reduction, begin

    def avoid_reduction_uploads(self) -> None:
        """Collect gradients for the reduction by plain copies. FSDP's own kernel uploads a table of addresses on the compute
        stream each time: while an offloaded optimizer fills PCIe, backward would wait for that upload at every unit."""
        reduce = self.group.post_backward

        def post_backward(*unused: Any) -> None:
            own = _fsdp_collectives.foreach_reduce_scatter_copy_in
            _fsdp_collectives.foreach_reduce_scatter_copy_in = partial(_copy_in, own)  # FSDP takes no function of a group's own
            try:
                reduce(*unused)
            finally:
                _fsdp_collectives.foreach_reduce_scatter_copy_in = own

        self.group.post_backward = post_backward

    def use_shards(self) -> None:
        """If the shard is the whole, rests on the device and is in the compute dtype, compute with it: gather without a copy."""
        group = self.group
        alone = getattr(group.mesh_info, "shard_mesh_size", 1) == 1 and hasattr(group, "_all_gather_output")
        compute = group.mp_policy.param_dtype
        if alone and all(_is_own_shard(p) and compute in (None, p._sharded_param_data.dtype) for p in group.fsdp_params):
            group.wait_for_unshard = partial(_gather_alone, group, group.wait_for_unshard, _use_shards)

    def adopt(self) -> None:
        """Register the modules' current parameters as FSDP's shards, permanently. FSDP would do so at its first run and after
        `load_state_dict`, when the storage of offloaded shards is already freed."""
        for p in self.group.fsdp_params:
            p.reset_sharded_param()
            p._init_extensions()
            p.reset_sharded_param = _do_nothing
        self.group._reset_sharded_params = True

    def hold_gathers(self, event: Any) -> None:
        """Make all later gathers wait for `event` before they read the shards."""
        self.group._wait_all_gather_streams_on_event(event)

    def padded(self) -> list[tuple[Any, int]]:
        """(parameter, number of elements of its padded shard) for each parameter."""
        return [(p.sharded_param, p.padded_sharded_param_size.numel()) for p in self.group.fsdp_params]

    def buffers(self) -> list[tuple[Any, Tensor]]:
        """(parameter, its flat padded shard) for each parameter."""
        return [(p.sharded_param, p._sharded_param_data) for p in self.group.fsdp_params]


def _gradient_as_vector(original: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
    return original(gradient).reshape(1)


def _do_nothing() -> None:
    pass


@no_grad()
def _gather_alone(group: Any, original: Callable[[], None], fill: Callable[[Any], None]) -> None:
    """`wait_for_unshard` of a group of one rank. `fill`: gives the parameters their values."""
    parameters = group.fsdp_params
    if not group._all_gather_result or not all(_is_plain_shard(p) for p in parameters):
        return original()
    before = group.comm_ctx.all_gather_state  # of another unit, which several ranks share
    if before is not None and group._training_state is _TrainingState.FORWARD:
        group._wait_all_gather_streams_on_event(before.event)
        group.comm_ctx.all_gather_state = None
    fill(group)
    group._to_unsharded()
    copied = group.device_handle.Event()
    copied.record()
    group._wait_all_gather_streams_on_event(copied)
    group._all_gather_result = None


def _cast_shards(group: Any) -> None:
    parameters = group.fsdp_params
    shards = [p._sharded_param_data for p in parameters]
    for p, shard in zip(parameters, shards, strict=True):
        p.init_all_gather_outputs([shard.numel()], [p.param_dtype or shard.dtype], 1, group.device)
        p.alloc_all_gather_outputs()
    copies = [p.all_gather_outputs[0] for p in parameters]
    with _unsafe_preserve_version_counter(tuple(copies)):
        _foreach_copy_(copies, shards)
    for p in parameters:
        p.init_unsharded_param()


def _use_shards(group: Any) -> None:
    """FSDP frees what it gathered into, and here that is nothing."""
    for p in group.fsdp_params:
        shard = p._sharded_param_data
        if not hasattr(p, "_unsharded_param"):
            p._unsharded_param = Parameter(shard.view(p._orig_size), requires_grad=p.sharded_param.requires_grad)
        elif p._unsharded_param.data_ptr() != shard.data_ptr():
            p._unsharded_param.data = shard.view(p._orig_size)


def _is_own_shard(parameter: Any) -> bool:
    """True if the shard was never gathered into other memory, and the whole of it is a plain tensor."""
    return _is_plain_shard(parameter) and not parameter.is_dtensor and not hasattr(parameter, "_unsharded_param")


def _is_plain_shard(parameter: Any) -> bool:
    """True if a gather only casts the shard: it rests on the device, and is no subclass with a gather of its own."""
    local = parameter._sharded_local_tensor
    whole = parameter.sharded_state is _ShardedState.SHARDED
    return whole and not parameter.offload_to_cpu and not hasattr(local, "fsdp_pre_all_gather")


@dataclass
class ComputedGradients:
    """Whether gradients of units whose shard is the whole stay in the dtype that they were computed in, now."""

    on: bool = False


@no_grad()
def _take_gradients(group: Any, original: Callable[..., None], computed: ComputedGradients, *unused: Any) -> None:
    """`post_backward` of a group of one rank, where nothing is reduced."""
    own = (group._all_reduce_hook, group.gradient_divide_factor, getattr(group, "reduce_scatter_unused_params", False))
    if not group.reduce_grads or any(own):
        return original(*unused)
    with record_function(group._with_fqn("FSDP::post_backward_accumulate")):  # the name that a trace has of FSDP's own
        _finish_backward(group, computed)


def _finish_backward(group: Any, computed: ComputedGradients) -> None:
    group._training_state = _TrainingState.POST_BACKWARD
    found: list[tuple[Any, Tensor]] = []
    for p in group.fsdp_params:
        p.accumulate_unsharded_grad_if_needed()
        if p.unsharded_accumulated_grad is not None:
            found.append((p, p.unsharded_accumulated_grad_data))
            p.unsharded_accumulated_grad = None
        elif hasattr(p, "_unsharded_param") and p.unsharded_param.grad is not None:
            found.append((p, p.unsharded_grad_data))
            p.unsharded_param.grad = None
    if group.reshard_after_backward:
        group.reshard()
    while found:  # each is freed before the next is cast
        _give_gradient(*found.pop(0), group._reduce_dtype, computed)


def _give_gradient(parameter: Any, gradient: Tensor, reduce: dtype | None, computed: ComputedGradients) -> None:
    """Make a gradient the one of a parameter's shard, or add it. By default it is in the shard's dtype, through the plan's."""
    shard = parameter.sharded_param
    if shard.grad is not None:
        shard.grad._local_tensor += _rounded(gradient, reduce)
    else:
        if not computed.on:
            gradient = _rounded(gradient, reduce).to(shard.dtype)
        shard.grad_dtype = gradient.dtype  # torch refuses a gradient of another dtype than this
        shard.grad = dtensor_like(shard, gradient.contiguous().view(parameter.sharded_size))
    for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(shard)


def _rounded(gradient: Tensor, reduce: dtype | None) -> Tensor:
    """The gradient in the reduce dtype, if that one is not wider: several ranks would round it so."""
    return gradient if reduce is None or reduce.itemsize > gradient.dtype.itemsize else gradient.to(reduce)


class _InPlaceReduction(getattr(_fsdp_api, "ReduceScatter", object)):  # type: ignore[misc]
    """A reduction over one rank: its output is its input. FSDP allocates the two in this order."""

    input: Tensor | None = None

    def allocate(self, size: Any, *, dtype: dtype, device: Any) -> Tensor:
        if self.input is not None:
            found, self.input = self.input, None
            return found
        self.input = empty(*size, dtype=dtype, device=device)
        return self.input

    def __call__(self, *arguments: Any, **more: Any) -> None:
        raise AssertionError("FSDP reduces over one rank by itself")


def gather_by(parameter: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Gather a sharded parameter by FSDP's extension for tensors: `before` makes what is gathered of the shard, `after` makes
    the parameter of it. The shard itself stays a plain tensor. To be called before the first forward: FSDP looks then."""
    parameter._local_tensor.fsdp_pre_all_gather = before
    parameter._local_tensor.fsdp_post_all_gather = after


def gather_group(module: FSDPModule) -> GatherGroup | None:
    """The module's parameter group; None if it has no parameters of its own."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and newer; fullshard makes one per module
    if groups is not None:
        return GatherGroup(groups[0]) if groups else None
    return GatherGroup(state._fsdp_param_group) if state._fsdp_param_group else None


def group_label(module: FSDPModule) -> str | None:
    """The name of the module's parameter group in traces; None if it has no parameters of its own."""
    group = gather_group(module)
    return None if group is None else str(group.group._module_fqn or "")


def forget_unfinished(modules: Iterable[FSDPModule], *_: object) -> None:
    """Let the next forward of a unit of several modules gather it, though one of them did not run in the last: torch 2.11
    waits for that one, such as T5's `shared`, whose weight other modules have. `modules`: one of each unit."""
    for module in modules:
        running = getattr(module._get_fsdp_state(), "_modules_to_run_forward", None)
        if running is not None:
            running.clear()


GatherFunction = Callable[[Tensor, Tensor, dist.ProcessGroup], None]  # output, shard, group
ReduceFunction = Callable[[Tensor, Tensor, dist.ProcessGroup], None]  # output, gradients, group


def can_replace_collectives() -> bool:
    """True if this torch lets FSDP's collectives be replaced."""
    kinds = all(hasattr(_fsdp_api, name) for name in ("AllGather", "ReduceScatter"))
    return kinds and all(hasattr(FSDPModule, f"set_custom_{name}") for name in ("all_gather", "reduce_scatter"))


def replace_collectives(module: FSDPModule, gather: GatherFunction | None, reduce: ReduceFunction | None) -> None:
    """Let FSDP call these functions for the module's own parameters; None leaves its own collective. `reduce` sums; FSDP's
    average is taken from the sum."""
    if gather is not None:
        module.set_custom_all_gather(_make_gather(gather))
    if reduce is not None:
        module.set_custom_reduce_scatter(_make_reduce(reduce))


def _allocate(self: Any, size: Any, *, dtype: dtype, device: Any) -> Tensor:
    return empty(*size, dtype=dtype, device=device)


def _make_gather(function: GatherFunction) -> Any:
    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        function(output_tensor, input_tensor, group)  # FSDP takes None for a collective that is on the stream already

    return type("Gather", (_fsdp_api.AllGather,), {"allocate": _allocate, "__call__": call})()


def _make_reduce(function: ReduceFunction) -> Any:
    def call(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        function(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())

    return type("Reduce", (_fsdp_api.ReduceScatter,), {"allocate": _allocate, "__call__": call})()


def _copy_in(original: Callable[..., None], gradients: list[Tensor], flat: Tensor, ranks: int) -> None:
    if not flat.is_cuda or any(g.ndim == 0 or g.size(0) % ranks for g in gradients):
        return original(gradients, flat, ranks)
    parts = flat.view(ranks, -1).split([g.numel() // ranks for g in gradients], dim=1)
    _foreach_copy_(list(parts), [g.reshape(ranks, -1) for g in gradients])
