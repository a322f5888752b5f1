"""Elastic data-parallel training in one file to copy from: a small convolutional network learns to read digits.

The job can be killed and scaled at any time and still reaches the same result, for three reasons:

1. The step number is the only state of the progress. The next samples, their distortion and the learning rate depend
   only on the step, and the global batch is the same for any number of workers.
2. One worker of each node saves a checkpoint every few seconds, in the node's own folder. No shared disk is needed.
3. Workers restart when their number changes. They compare their checkpoints, and the worker with the newest checkpoint
   broadcasts it.

Two calls of torchelastic report the progress to the agent, so that the cost of failures is visible. Without an agent,
the calls do nothing.

The data is part of scikit-learn: 1,797 images of 8 x 8 pixels. To run the program:

    elasticjob run examples/digits.yaml
    torchelastic-run --standalone --nproc-per-node 2 examples/digits.py
    python examples/digits.py                        (without any launcher: one worker)
"""

from __future__ import annotations

import argparse
import math
import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

import torchelastic

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
CHECKPOINT = "checkpoint.pt"
BATCH = 64  # samples in each step, of all workers together
SIDE = 20  # pixels
PEAK_LEARNING_RATE = 0.05


class ElasticSampler(Sampler[list[int]]):
    """Distribute global batches to any number of ranks, beginning at any step.

    The samples have one endless order, with a new shuffle for each epoch. A step takes the next ``batch`` samples; of
    these samples, rank r of R takes the samples r, r + R, r + 2 R, and so on. No sample is lost or repeated if training
    continues in the middle of an epoch with another number of ranks.
    """

    def __init__(self, samples: int, batch: int, steps: range, rank: int, world_size: int) -> None:
        self.samples, self.batch, self.steps, self.rank, self.world_size = samples, batch, steps, rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = divmod(self.steps.start * self.batch, self.samples)
        order = self._order(epoch)
        for _ in self.steps:
            while len(order) < start + self.batch:  # this batch reaches into the next epoch
                epoch += 1
                order, start = order[start:] + self._order(epoch), 0
            yield order[start : start + self.batch][self.rank :: self.world_size]
            start += self.batch

    def _order(self, epoch: int) -> list[int]:
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(epoch)).tolist()


def join() -> torch.device:
    """Join the process group of the launcher, and select a device."""
    if "RANK" in os.environ:
        # The processes share the cores, so each uses one thread, unless the launcher sets another number.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        distributed.init_process_group()  # gloo for CPU tensors, nccl for GPU tensors
    else:
        distributed.init_process_group(init_method="tcp://localhost:0", rank=0, world_size=1)
    # GPUs are used only if each worker has its own, because nccl does not allow sharing.
    mine = -1
    if torch.cuda.device_count() > LOCAL_RANK:
        mine = zlib.crc32(str(torch.cuda.get_device_properties(LOCAL_RANK).uuid).encode())
    if len(set(gather(mine)) - {-1}) < distributed.get_world_size():
        return torch.device("cpu")
    torch.cuda.set_device(LOCAL_RANK)
    return torch.device("cuda", LOCAL_RANK)


def gather(number: int) -> list[int]:
    """Return the number that each rank passes, in the order of the ranks."""
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(distributed.get_world_size())]
    distributed.all_gather(numbers, torch.tensor([number]))
    return [int(each) for each in numbers]


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint atomically, so that a complete one always exists."""
    temporary = folder / f"{CHECKPOINT}.{distributed.get_rank()}.tmp"
    with temporary.open("wb") as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / CHECKPOINT)


def newest(folder: Path) -> dict[str, Any] | None:
    """Return the newest checkpoint on this node; None if there is none."""
    folders = {folder}
    if folder.name.isdecimal():  # <job>/<index>: a shared volume also has the folders of the other pods
        folders |= set(folder.parent.glob("[0-9]*"))
    files = [each / CHECKPOINT for each in folders if (each / CHECKPOINT).is_file()]
    found = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    return max(found, key=lambda checkpoint: checkpoint["step"], default=None)


def restore(folder: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Find the newest checkpoint of all ranks, and load this checkpoint on each rank.

    Returns:
        The step at which training continues; 0 if there is no checkpoint.
    """
    for parameter in model.parameters():  # allocates the tensors that receive the broadcast
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    found = newest(folder) if folder and LOCAL_RANK == 0 else None
    steps = gather(found["step"] if found else 0)
    step, source = max(steps), steps.index(max(steps))
    if found and distributed.get_rank() == source:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    if step > 0:
        for tensor in model.state_dict().values():
            distributed.broadcast(tensor, source)
        for parameter in model.parameters():
            distributed.broadcast(optimizer.state[parameter]["momentum_buffer"], source)
    return step


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the data sets for training and testing: images with values from 0 to 1, and their digits."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, training = order[:360], order[360:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[test], labels[test])


def look(images: Tensor, transforms: Tensor) -> Tensor:
    """Enlarge each image to ``SIDE`` x ``SIDE`` pixels, and apply its 2 x 3 affine transform."""
    grid = functional.affine_grid(transforms, [len(images), 1, SIDE, SIDE], align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def distort(images: Tensor, step: int) -> Tensor:
    """Rotate, scale and move the images slightly at random, and add noise.

    The random numbers are drawn for the whole global batch. Each rank takes those of its own samples.
    """
    mine = slice(distributed.get_rank(), None, distributed.get_world_size())
    generator = torch.Generator().manual_seed(step)
    turn, scale, right, down = (2 * torch.rand(4, BATCH, generator=generator) - 1)[:, mine].to(images.device)
    noise = torch.randn(BATCH, 1, SIDE, SIDE, generator=generator)[mine].to(images.device)
    angle, zoom = math.radians(15) * turn, 1 + 0.15 * scale
    cosine, sine = zoom * angle.cos(), zoom * angle.sin()
    transforms = torch.stack([cosine, -sine, 0.2 * right, sine, cosine, 0.2 * down], dim=1).view(-1, 2, 3)
    return look(images, transforms) + 0.1 * noise


def make_model() -> nn.Module:
    """Return a network of four convolutions, without BatchNorm, whose result depends on how the batch is split."""

    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU()]

    torch.manual_seed(0)
    halve, read = nn.MaxPool2d(2), [nn.Flatten(), nn.Linear(128 * (SIDE // 8) ** 2, 10)]
    return nn.Sequential(*layer(1, 64), *layer(64, 64), halve, *layer(64, 128), halve, *layer(128, 128), halve, *read)


def train(options: argparse.Namespace, data: TensorDataset, device: torch.device) -> nn.Module:
    """Train from the newest checkpoint to the last step, and return the model."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    total = math.ceil(options.epochs * len(data) / BATCH)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=PEAK_LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    folder = options.checkpoint_dir if LOCAL_RANK == 0 else None
    first = restore(folder, model, optimizer)
    if rank == 0:
        print(f"resumed at step {first}" if first else "started", f"with {world_size} workers", flush=True)

    parallel = DistributedDataParallel(model)
    sampler = ElasticSampler(len(data), BATCH, range(first, total), rank, world_size)
    said_step, said, saved = first, time.monotonic(), time.monotonic()
    for step, (images, labels) in enumerate(DataLoader(data, sampler=sampler, batch_size=None), start=first + 1):
        torchelastic.step()  # the first call marks the end of restoring
        for group in optimizer.param_groups:  # warm up, then fall along half a cosine
            group["lr"] = PEAK_LEARNING_RATE * min(1, 10 * step / total) * (1 + math.cos(math.pi * step / total)) / 2
        scores = parallel(distort(images.to(device), step))
        # DistributedDataParallel takes the mean over the ranks, and some ranks may have one sample more than others.
        loss = functional.cross_entropy(scores, labels.to(device), reduction="sum") * world_size / BATCH
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        now = time.monotonic()
        if rank == 0 and (step == first + 1 or now - said >= 1 or step == total):
            epoch, speed = math.ceil(step * BATCH / len(data)), (step - said_step) * BATCH / (now - said) / 1000
            progress = f"epoch {min(epoch, options.epochs)}/{options.epochs}  step {step}/{total}"
            print(f"{progress}  loss {loss.item():.3f}  {speed:.1f}k samples/s", flush=True)
            said_step, said = step, now
        if folder and (now - saved >= options.checkpoint_every or step == total):
            with torchelastic.report_checkpoint():  # reports the checkpoint to the agent
                save(folder, step, model, optimizer)
            saved = time.monotonic()
    return model


def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the fraction of the images that the model classifies correctly."""
    images, labels = (tensor.to(device) for tensor in data.tensors)
    with torch.inference_mode():
        answers = model(look(images, torch.eye(2, 3, device=device).expand(len(images), 2, 3))).argmax(dim=1)
    return float((answers == labels).float().mean())


def main() -> None:
    """Train and test the model, and print its accuracy."""
    parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's digits, elastically.")
    parser.add_argument("--epochs", type=int, default=80, help="passes over the data (default: %(default)s)")
    parser.add_argument("--checkpoint-every", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--checkpoint-dir", type=Path, default=os.environ.get("TORCHELASTIC_CHECKPOINT_DIR"))
    options = parser.parse_args()
    if options.checkpoint_dir:
        options.checkpoint_dir.mkdir(parents=True, exist_ok=True)

    device = join()
    training, test = load_data()
    model = train(options, training, device)
    if distributed.get_rank() == 0:
        print(f"test accuracy {accuracy(model, test, device):.3f}", flush=True)
    distributed.barrier()  # waits for all ranks
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
