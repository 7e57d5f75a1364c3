"""Configurations of other systems: the keys and values of files that those projects ship, in a layout of our own."""

import json

ZERO3_OFFLOAD = {  # Accelerate's template for ZeRO 3 with offload: much is left to the Trainer
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
LLAMA_13B = {  # DeepSpeedExamples, a Llama of 13B with its optimizer on the host
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1000000000,
        "reduce_bucket_size": 200000000,
        "stage3_prefetch_bucket_size": 200000000,
        "stage3_param_persistence_threshold": 100000,
        "stage3_max_live_parameters": 1000000000,
        "stage3_max_reuse_distance": 1000000000,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 2000, "total_num_steps": 100000},
    },
}
INFINITY = {  # DeepSpeedExamples, Megatron with everything on disk
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persitance_threshold": 1e5,  # misspelt in the file: DeepSpeed has no such key
        "sub_group_size": 1e8,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme_data", "buffer_count": 4, "pipeline_read": False},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme_data", "max_in_cpu": 1, "pin_memory": True},
    },
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 1024, "loss_scale_window": 1000, "hysteresis": 2},
    "aio": {"block_size": 1048576, "queue_depth": 16, "single_submit": False, "overlap_events": True, "thread_count": 2},
    "zero_allow_untested_optimizer": False,
    "wall_clock_breakdown": True,
}
CIFAR = {  # DeepSpeedExamples, with the old spelling of offload
    "train_batch_size": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {"enabled": True, "fp16_master_weights_and_grads": True, "loss_scale": 0, "initial_scale_power": 15},
    "zero_optimization": {"stage": 2, "allgather_partitions": True, "reduce_scatter": True, "cpu_offload": True},
}
ZENFLOW = {  # DeepSpeedExamples
    "train_batch_size": 32,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
}
FSDP1_YAML = """
distributed_type: FSDP
mixed_precision: 'bf16'
num_processes: 2
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_activation_checkpointing: false
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
"""
FSDP2_YAML = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 1
tpu_env: []
use_cpu: false
"""
DDP_YAML = """
distributed_type: MULTI_GPU
machine_rank: 0
main_process_ip: '1234'
main_process_port: 9999
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: false
"""
DEEPSPEED_YAML = """
distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config: {deepspeed_config_file: zero.json, zero3_init_flag: false}
"""
INLINE_YAML = """
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 4
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
"""
LLAMA3_8B = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"
[profiling]
enable_profiling = true
profile_freq = 100
[metrics]
log_freq = 10
enable_tensorboard = true
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
async_mode = "disabled"
[compile]
enable = false
components = ["model", "loss"]
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[quantize.linear.float8]
filter_fqns = ["output"]
[validation]
enable = false
freq = 500
"""
DEBUG_MODEL = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
[optimizer]
name = "AdamW"
lr = 8e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.5
decay_type = "linear"
min_lr_factor = 0.0
[training]
local_batch_size = 8
seq_len = 2048
max_norm = 1.0
steps = 10
dataset = "c4_test"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "never"
tensor_parallel_degree = 1
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_degree = 1
[checkpoint]
enable = true
interval = 10
keep_latest_k = 3
async_mode = "async"
[activation_checkpoint]
mode = "selective"
selective_ac_option = '2'
[validation]
enable = true
dataset = "c4_validation"
freq = 5
steps = 10
"""
FSDP2_SCRIPT = """
raise SystemExit("a script that is read must not run")
import argparse
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

def main(args):
    torch.manual_seed(0)
    kwargs = {}
    if args.mixed_precision:
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    layer.set_modules_to_forward_prefetch([])
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
"""
FSDP1_SCRIPT = """
import functools
import torch.optim as optim
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.optim.lr_scheduler import StepLR

policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
model = FSDP(model, auto_wrap_policy=policy, mixed_precision=half, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
             cpu_offload=CPUOffload(offload_params=True), backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
             device_id=torch.cuda.current_device(), limit_all_gathers=True)
parser.add_argument("--batch-size", type=int, default=4)
loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, num_workers=2)
optimizer = optim.AdamW(model.parameters(), lr=train_config.lr, weight_decay=0.05)
scheduler = StepLR(optimizer, step_size=1, gamma=train_config.gamma)
"""
DDP_SCRIPT = """
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(model, device_ids=[rank], find_unused_parameters=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
"""
TITAN_SCRIPT = """
from torchtitan.trainer import Trainer
def llama3(): return Trainer.Config(training=TrainingConfig(steps=10))
"""
FILES = {
    "zero3_offload.json": json.dumps(ZERO3_OFFLOAD),
    "llama_13b.json": json.dumps(LLAMA_13B),
    "infinity.json": json.dumps(INFINITY),
    "cifar.json": json.dumps(CIFAR),
    "zenflow.json": json.dumps(ZENFLOW),
    "fsdp1.yaml": FSDP1_YAML,
    "fsdp2.yaml": FSDP2_YAML,
    "ddp.yaml": DDP_YAML,
    "deepspeed.yaml": DEEPSPEED_YAML,
    "inline.yaml": INLINE_YAML,
    "llama3_8b.toml": LLAMA3_8B,
    "debug_model.toml": DEBUG_MODEL,
    "fsdp2.py": FSDP2_SCRIPT,
    "fsdp1.py": FSDP1_SCRIPT,
    "ddp.py": DDP_SCRIPT,
}
