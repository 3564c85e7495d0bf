"""Shards its own model with FSDP2, in two groups of processes, and fills it afterwards."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("cpu:gloo,cuda:nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
half = int(os.environ["WORLD_SIZE"]) // 2
mesh = init_device_mesh("cuda", (2, half), mesh_dim_names=("replicate", "shard"))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 8))
for layer in model[:4]:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device="cuda")
for layer in model:
    layer.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(4):
    loss = model(torch.randn(8, 64, device="cuda")).float().sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
