"""Elastic training with Lightning Fabric, which creates the process group: workers restart from a checkpoint.

torchelastic-run --standalone --nproc-per-node 2 --max-restarts 3 examples/fabric_elastic.py
"""

import os
from typing import Any

import torch
from lightning_fabric import Fabric
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import torchelastic

EPOCHS = 10

devices, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
fabric = Fabric(devices=devices, num_nodes=nodes, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
features = torch.randn(9600, 16)
dataset = TensorDataset(features, features[:, :4].argmax(dim=1))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = torchelastic.ElasticSampler(dataset, batch_size=60)  # of all workers together
# Only the model and the optimizer are set up: the sampler already divides each batch among the ranks.
prepared, optimizer = fabric.setup(model, optimizer)
parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
folder = None if "TORCHELASTIC_CHECKPOINT_DIR" in os.environ else "checkpoints"
checkpointer = torchelastic.Checkpointer(folder, every=100)
step = 0
if (saved := checkpointer.load()) is not None:
    step = saved["step"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])
fabric.print(f"training begins at step {step} with {fabric.world_size} workers", flush=True)

for _ in range(sampler.epoch, EPOCHS):
    for inputs, targets in DataLoader(dataset, batch_sampler=sampler):
        scores = prepared(inputs.to(fabric.device))
        losses = functional.cross_entropy(scores, targets.to(fabric.device), reduction="none")
        optimizer.zero_grad()
        fabric.backward(sampler.mean(losses))
        optimizer.step()
        sampler.advance()
        step += 1
        checkpointer.save(step, {"step": step, **{name: part.state_dict() for name, part in parts.items()}})
checkpointer.close()  # waits until the last checkpoint is written
correct = model(features.to(fabric.device)).argmax(dim=1).cpu() == dataset.tensors[1]
fabric.print(f"accuracy {correct.float().mean():.3f}", flush=True)
