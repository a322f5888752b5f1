"""The task of digits.py in restart style: all workers start again when one is lost, from the newest checkpoint.

This style also works with GPUs, and for programs that create their process group themselves.

    torchelastic-run --standalone --nproc-per-node 2 --max-restarts 3 examples/digits_restart.py
"""

import os
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchelastic

EPOCHS = 40

distributed.init_process_group()
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # the workers of a machine share its cores
device = torch.device("cpu")
if torch.cuda.is_available():  # one GPU for each worker
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
dataset = TensorDataset(images[360:], labels[360:])
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
sampler = torchelastic.ElasticSampler(dataset, batch_size=64)  # of all workers together
parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
folder = None if "TORCHELASTIC_CHECKPOINT_DIR" in os.environ else "checkpoints"
checkpointer = torchelastic.Checkpointer(folder, every=100)
saved = checkpointer.load()  # the newest checkpoint of all workers; None at the first start
step = 0
if saved is not None:
    step = saved["step"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])
if distributed.get_rank() == 0:
    print(f"training begins at step {step} with {distributed.get_world_size()} workers", flush=True)

parallel = DistributedDataParallel(model)
for _ in range(sampler.epoch, EPOCHS):
    for inputs, targets in DataLoader(dataset, batch_sampler=sampler):
        losses = functional.cross_entropy(parallel(inputs.to(device)), targets.to(device), reduction="none")
        optimizer.zero_grad()
        sampler.mean(losses).backward()
        optimizer.step()
        sampler.advance()
        step += 1
        checkpointer.save(step, {"step": step, **{name: part.state_dict() for name, part in parts.items()}})
checkpointer.close()  # waits until the last checkpoint is written
if distributed.get_rank() == 0:
    correct = model(images[:360].to(device)).argmax(dim=1).cpu() == labels[:360]
    print(f"test accuracy {correct.float().mean():.3f}", flush=True)
distributed.destroy_process_group()
