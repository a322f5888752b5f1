"""Training of a model that is sharded over the ranks (FSDP2), with checkpoints that any number of ranks can load.

Each rank writes its part of a checkpoint into a folder that all ranks share. When ranks join, leave or die, the workers
start again with the new number of ranks, and continue from the newest checkpoint. To run the program:

    torchelastic-run --standalone --nproc-per-node 2 examples/fsdp2.py checkpoints
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import torchelastic


@torchelastic.elastic
def train(state: torchelastic.TorchState, epochs: int, device: torch.device) -> None:
    """Train until a number of epochs is done."""
    sampler = state.data.batch_sampler
    loss = torch.zeros(())
    print(f"training begins at step {state.commits} with {distributed.get_world_size()} ranks", flush=True)
    while sampler.epoch < epochs:
        for inputs, targets in state.data:
            state.optimizer.zero_grad()
            loss = sampler.mean((state.model(inputs.to(device)) - targets.to(device)).square())
            loss.backward()
            state.optimizer.step()
            state.commit()
    print(f"training ends at step {state.commits} with the loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Create what is trained, and train it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("checkpoints", help="a folder that all ranks share")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()

    # A sharded model belongs to its process group, so the program creates the group, before the function of @elastic.
    distributed.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", distributed.get_node_local_rank())
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    inputs = torch.randn(1024, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    state = torchelastic.TorchState(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        data=DataLoader(data, batch_sampler=torchelastic.ElasticSampler(data, batch_size=64)),
        checkpointer=torchelastic.Checkpointer(arguments.checkpoints, every=10),
    )
    train(state, arguments.epochs, device)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
