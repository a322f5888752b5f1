"""Elastic data-parallel training in one file to copy from: a small convolutional network learns to read digits.

When a worker is killed, or pods come and go, the other workers keep the model in memory and train on. New workers get
the state from them; if all were stopped, they load the newest checkpoint. The result is the same for any number of
workers, because the samples and their distortion depend only on the step. The data is part of scikit-learn.

    elasticjob run examples/digits.yaml
    torchelastic-run --standalone --nproc-per-node 2 examples/digits.py
    python examples/digits.py                        (without any launcher: one worker)
"""

import argparse
import os
import time
from datetime import timedelta

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchelastic

BATCH = 64  # samples in each step, of all workers together
SIDE = 20  # pixels


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the data sets for training and testing: images with values from 0 to 1, and their digits."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    images = functional.interpolate(images, (SIDE, SIDE), mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, training = order[:360], order[360:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[test], labels[test])


def distort(images: Tensor, step: int) -> Tensor:
    """Transform this rank's images slightly at random, and add noise: its part of the numbers of the global batch."""
    mine = range(distributed.get_rank(), BATCH, distributed.get_world_size())[: len(images)]
    generator = torch.Generator().manual_seed(step)
    transforms = torch.eye(2, 3) + 0.12 * torch.randn(BATCH, 2, 3, generator=generator)
    noise = 0.1 * torch.randn(BATCH, 1, SIDE, SIDE, generator=generator)
    grid = functional.affine_grid(transforms[mine], [len(images), 1, SIDE, SIDE], align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False) + noise[mine]


def make_model() -> nn.Module:
    """Return a network of four convolutions, without BatchNorm, whose result depends on how the batch is split."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for inputs, outputs in ((1, 64), (64, 64), (64, 128), (128, 128)):
        model.extend([nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU()])
        model.extend([nn.MaxPool2d(2)] if inputs > 1 else [])
    return model.extend([nn.Flatten(), nn.Linear(128 * (SIDE // 8) ** 2, 10)])


@torchelastic.elastic  # calls the function again, with the same state, when the number of workers changes
def train(state: torchelastic.TorchState, epochs: int, total: int) -> bool:
    """Train to the last step; return whether this is rank 0."""
    first, world_size, is_first_rank = state.commits, distributed.get_world_size(), distributed.get_rank() == 0
    if is_first_rank:
        print(f"resumed at step {first}" if first else "started", f"with {world_size} workers", flush=True)
    parallel, sampler, said = DistributedDataParallel(state.model), state.data.batch_sampler, (first, time.monotonic())
    for epoch in range(sampler.epoch, epochs):
        for images, labels in state.data:
            step, now = state.commits + 1, time.monotonic()
            scores = parallel(distort(images, step))
            loss = sampler.mean(functional.cross_entropy(scores, labels, reduction="none"))
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            state.scheduler.step()
            if is_first_rank and (step in (first + 1, total) or now - said[1] >= 1):
                speed, said = (step - said[0]) * BATCH / (time.monotonic() - said[1]) / 1000, (step, now)
                where = f"epoch {epoch + 1}/{epochs}  step {step}/{total}"
                print(f"{where}  loss {loss:.3f}  {speed:.1f}k samples/s", flush=True)
            state.commit()  # the step counts; a checkpoint is saved if one is due
    return is_first_rank


def main() -> None:
    """Train and test the model, and print its accuracy."""
    parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's digits, elastically.")
    parser.add_argument("--epochs", type=int, default=80, help="passes over the data (default: %(default)s)")
    parser.add_argument("--checkpoint-every", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--checkpoint-dir", help="default: the pod's, $TORCHELASTIC_CHECKPOINT_DIR")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # the workers of a machine share its cores
    training, test = load_data()
    model, sampler = make_model(), torchelastic.ElasticSampler(training, batch_size=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    total = options.epochs * len(sampler)
    folder, every = options.checkpoint_dir, timedelta(seconds=options.checkpoint_every)
    is_saved = folder or "TORCHELASTIC_CHECKPOINT_DIR" in os.environ
    state = torchelastic.TorchState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total, cycle_momentum=False),
        data=DataLoader(training, batch_sampler=sampler),
        checkpointer=torchelastic.Checkpointer(folder, every=every) if is_saved else None,
    )
    if train(state, options.epochs, total):
        print(f"test accuracy {(model(test[:][0]).argmax(dim=1) == test[:][1]).float().mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
