"""Privates of torch that accel_trainer uses: paths of names, texts of errors, and names of operations.

`torch_private.py`, and of DDP and FSDP2 `torch_engines.py`, has the functions that use them. A test asks the installed
torch for each name.
"""

from __future__ import annotations

SEEN_IN = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""Releases of torch in which all of them were found, but for those of `ABSENT_IN`."""
_SHARD_MESH = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._init_shard_mesh"
ABSENT_IN = {"torch.distributed.fsdp._common_utils.collect_grad_tensors": ("2.11.0",), _SHARD_MESH: ("2.11.0",)}

# gloo raises plain RuntimeErrors, whose texts alone tell a peer that is gone from one that does not come. Without these
# words a rank raises gloo's own error, which names no rank.
CLOSED_TEXT = "Application timeout caused pair closure"
BROKEN_TEXTS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", CLOSED_TEXT,
)  # fmt: skip
EXPIRED_TEXTS = ("Timed out waiting", "operation timeout", "wait timeout after")
"""What gloo, NCCL and the store say."""

# Operations as a dispatch mode sees them: it is given the name, and modules of torch call them, not this library.
GROUPED_MM = "_grouped_mm"
CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
CPU_ATTENTION_BACKWARD = f"{CPU_ATTENTION}_backward"
UNIT_EXCHANGES = ("_allgather_base_", "_reduce_scatter_base_")

GROUP_REGISTRY = ("_register_process_group", "_unregister_all_process_groups")
SNAPSHOTS = ("record_memory_history", "dump_snapshot")

SHAPE_INFERENCE = "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached"
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"
HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler"
_REFUSED = "AccelTrainerError where it is used"
_FOREACH = f"{_REFUSED}: gradients are scaled, clamped, copied and added by one kernel for all"
FSDP_UNIT = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_NOT_NOTED = "ranks that use unlike parameters under FSDP2 are not told so: gloo ends them, or they hang"
_PREFLIGHT = f"{_REFUSED}: plans of layouts, as preflight makes them in a job"
_PLANS = f"{_REFUSED}: `accel-trainer estimate` plans no layouts"
_NOT_CLEARED = "not cleared: after find_executable_batch_size() has made a new group, DTensors may refer to the old one"
_RING_GONE = f"{_REFUSED}: parallel.cp_size"
_PLANNED = "`accel-trainer estimate` counts no operations of mixtures of experts, or of attention on CPUs"
_EXPOSED = "`accel-trainer estimate` says that the computation waits for FSDP2's parameters"
_NOT_OUTLIVED = f"{_REFUSED}: where a rank is lost, by `accel-trainer launch --on_rank_loss continue`"
_NOT_REPLACED = f"{_REFUSED}: where a rank is to be started again, by on_rank_loss 'replace'"
PRIVATE_NAMES = {
    **{f"torch._foreach_{name}_": _FOREACH for name in ("add", "clamp_max", "clamp_min", "copy", "mul", "zero")},
    "torch._foreach_norm": f"{_REFUSED}: norms of gradients are computed by one kernel for all",
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": "torch.compile(model) is taken for a model of the user",
    "torch.Tensor._backward_hooks": f"{_REFUSED}: hooks of parameters that FSDP2 would lose are refused",
    "torch.Tensor._make_subclass": _REFUSED,
    "torch.Tensor._post_accumulate_grad_hooks": f"{_REFUSED}: likewise",
    "torch._C._swap_tensor_impl": f"{_REFUSED}: recurrent modules on the meta device get their memory by it",
    "torch._C._distributed_c10d._dump_fr_trace_json": "reports of hangs do not name each rank's last collective",
    "torch.amp.GradScaler._per_optimizer_states": f"{_REFUSED}: fp16 asks it whether an optimizer's step was skipped",
    "torch._subclasses.fake_tensor.FakeTensor": "layouts with ep_size are not planned",
    "torch._subclasses.fake_tensor.FakeTensorMode": _PLANS,
    "torch.autograd.Variable._execution_engine": f"{_REFUSED}: FSDP2's unsharded gradients are averaged after backward",
    "torch.distributed.Reducer._reset_state": (
        "a model whose backward has failed cannot be trained again while its DDP wrapper is held: DDP raises"
    ),
    "torch.distributed.Reducer._check_reducer_finalized": (
        "an update of DDP whose backward left parameters out is applied, and the next forward raises torch's error"
    ),
    "torch.distributed.ProcessGroup._device_types": _REFUSED,
    "torch.distributed.ProcessGroup._get_backend": _REFUSED,
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": (
        "reports of hangs do not say how many collectives each rank has begun"
    ),
    "torch.distributed.ProcessGroupGloo._set_default_timeout": "the timeout of a group that exists stays as it is",
    "torch.distributed.ProcessGroupGloo.Options._timeout": "torch's default of 30 minutes is taken for the timeout",
    "torch.distributed.distributed_c10d._get_default_group": _REFUSED,
    "torch.distributed.distributed_c10d._get_default_store": f"{_REFUSED}: by find_executable_batch_size()",
    "torch.distributed.distributed_c10d._world": f"{_REFUSED}: by find_executable_batch_size() on accelerators",
    "torch.distributed.distributed_c10d._update_default_pg": _PREFLIGHT,
    **{f"torch._C._distributed_c10d.{name}": _PREFLIGHT for name in GROUP_REGISTRY},
    **{
        f"{AGENT}.{name}": f"overridden in launch/torchrun.py: {consequence}"
        for name, consequence in {
            "_shutdown": "workers would get signals from torch, which waits 30 s and loses their codes",
            "_start_workers": "a failed worker would be reported after the others' end only",
            "_rendezvous": "no heartbeat between machines, and as many ranks after a loss as before",
            "_monitor_workers": "codes 76, 85 and 93 would start the workers again",
            "_exit_barrier": "a machine would wait 300 s for the others' workers, and no longer",
        }.items()
    },
    f"{AGENT}._pcontext": _NOT_OUTLIVED,
    f"{HANDLER}._popen": _NOT_REPLACED,
    "torch._C._distributed_c10d._create_work_from_future": _NOT_REPLACED,
    **{
        f"torch.nn.parallel.DistributedDataParallel.{name}": f"{_REFUSED}: by on_rank_loss 'continue'"
        for name in (
            *("_update_process_group", "_pre_forward", "_build_params_for_reducer", "_ddp_init_helper"),
            "_build_debug_param_to_name_mapping",
        )
    },
    f"{AGENT}._restart_workers": f"{_REFUSED}: machines that come to a job, by `accel-trainer launch`",
    f"{AGENT}._remaining_restarts": (f"{_REFUSED}: jobs on several ranks, by `accel-trainer launch`"),
    "torch.distributed.fsdp._common_utils.collect_grad_tensors": (
        "dataclasses that a model of FSDP2 returns are refused; releases without it do not look into them"
    ),
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": _NOT_NOTED,
    FSDP_UNIT: f"{_NOT_NOTED}; by its methods pre_forward and post_backward",
    _SHARD_MESH: f"{_REFUSED}: replicas of shards, by on_rank_loss 'continue'",
    "torch.distributed.nn.functional.all_reduce.__defaults__": "nothing to forget: no function holds the group",
    "torch.distributed.tensor.DTensor._spec": "DTensor.from_local() derives the layout again, in ten times the time",
    "torch.distributed.tensor._collective_utils.MeshTopoInfo.build_from_mesh": _NOT_CLEARED,
    "torch.distributed.tensor._redistribute._gen_transform_infos": _NOT_CLEARED,
    "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache": _NOT_CLEARED,
    **{
        f"torch.distributed.tensor.experimental._context_parallel._attention.{name}": _RING_GONE
        for name in ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options", "_RotateMethod")
    },
    **{f"torch._C._dispatch_{name}": _RING_GONE for name in ("has_kernel_for_dispatch_key", "key_for_device")},
    **{
        f"torch.ops.aten._scaled_dot_product_{name}": _RING_GONE
        for kind in ("flash", "efficient")
        for name in (f"{kind}_attention", f"{kind}_attention_backward")
    },
    **{f"torch.ops.aten.{name}": _PLANNED for name in (GROUPED_MM, CPU_ATTENTION, CPU_ATTENTION_BACKWARD)},
    **{f"torch.ops.c10d.{name}": _EXPOSED for name in UNIT_EXCHANGES},
    SHAPE_INFERENCE: "`accel-trainer estimate` counts full tensors as memory of an update under FSDP2",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": _NOT_CLEARED,
    **{f"torch.cuda.memory._{name}": "a trace of updates comes without a snapshot of the memory" for name in SNAPSHOTS},
    "torch.distributed.device_mesh.DeviceMesh._pg_registry": _NOT_CLEARED,
    "torch.distributed.device_mesh.DeviceMesh._flatten": f"{_REFUSED}: ParallelismConfig.build_device_mesh()",
    "torch.distributed.device_mesh.DeviceMesh._unflatten": f"{_REFUSED}: parallel.ep_size",
    "torch.nn.Module._buffers": _REFUSED,
    "torch.nn.Module._call_impl": _REFUSED,
    "torch.nn.Module._compiled_call_impl": f"{_REFUSED}: models whose forward is torch's own would not be compiled",
    "torch.nn.Module._forward_hooks": f"{_REFUSED}: prompts of PEFT are saved under FSDP2 and ZeRO-3",
    "torch.nn.Module._forward_pre_hooks": f"{_REFUSED}: likewise",
    "torch.nn.Module._modules": _REFUSED,
    "torch.nn.Module._non_persistent_buffers_set": f"{_REFUSED}: such buffers are in no state dict, and not offloaded",
    "torch.nn.Module._parameters": _REFUSED,
    "torch.nn.MultiheadAttention._reset_parameters": "values that a checkpoint lacks are reported as not initialised",
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": "exposed communication is not measured",
    "torch.ops.aten.mm.default._schema": f"{_REFUSED}: activation_checkpointing selective or ops",
    "torch.optim.AdamW._step_supports_amp_scaling": "fp16: fused optimizers cost a kernel more",
    "torch.testing._internal.distributed.fake_pg.FakeStore": _PLANS,
    "torch.utils._device.DeviceContext": _PLANS,
    "torch.utils._python_dispatch.TorchDispatchMode": _PLANS,
    "torch.utils._pytree.tree_leaves": _REFUSED,
    "torch.utils.checkpoint._CachedTorchDispatchMode": f"{_REFUSED}: activation_checkpointing selective or ops",
    "torch.utils.checkpoint._CachingTorchDispatchMode": (
        f"{_REFUSED}: activation_offload with activation_checkpointing selective or ops"
    ),
    "torch.utils.data.DataLoader._IterableDataset_len_called": "torch may warn about the length of a stream",
    "torch.utils.data.DataLoader._get_iterator": (
        "overridden in data/loader.py: what workers draw would depend on where a pass begins, as with torch alone"
    ),
    "torch.utils.data.DataLoader._iterator": "persistent workers would be shared by a prepared loader and its copies",
    "torch.utils.data._utils.worker._worker_info": (
        f"{_REFUSED}: a stream that workers have read goes on with another number of them"
    ),
    "torch.utils.data.dataloader._BaseDataLoaderIter": "a loader that keeps an iterator of the dataset is not refused",
}
"""By the path of a name, the consequence on a release of torch without it."""
