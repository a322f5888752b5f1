"""Elastic training with Hugging Face Accelerate, which creates the process group: workers restart from a checkpoint.

torchelastic-run --standalone --nproc-per-node 2 --max-restarts 3 examples/accelerate_elastic.py
"""

import os
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import torchelastic

EPOCHS = 10

accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
features = torch.randn(9600, 16)
dataset = TensorDataset(features, features[:, :4].argmax(dim=1))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = torchelastic.ElasticSampler(dataset, batch_size=60)  # of all workers together
# Only the model and the optimizer are prepared: the sampler already divides each batch among the ranks.
prepared, optimizer = accelerator.prepare(model, optimizer)
parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
folder = None if "TORCHELASTIC_CHECKPOINT_DIR" in os.environ else "checkpoints"
checkpointer = torchelastic.Checkpointer(folder, every=100)
step = 0
if (saved := checkpointer.load()) is not None:
    step = saved["step"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])
accelerator.print(f"training begins at step {step} with {accelerator.num_processes} workers", flush=True)

for _ in range(sampler.epoch, EPOCHS):
    for inputs, targets in DataLoader(dataset, batch_sampler=sampler):
        scores = prepared(inputs.to(accelerator.device))
        losses = functional.cross_entropy(scores, targets.to(accelerator.device), reduction="none")
        optimizer.zero_grad()
        accelerator.backward(sampler.mean(losses))
        optimizer.step()
        sampler.advance()
        step += 1
        checkpointer.save(step, {"step": step, **{name: part.state_dict() for name, part in parts.items()}})
checkpointer.close()  # waits until the last checkpoint is written
correct = model(features.to(accelerator.device)).argmax(dim=1).cpu() == dataset.tensors[1]
accelerator.print(f"accuracy {correct.float().mean():.3f}", flush=True)
accelerator.end_training()
