"""A small CNN learns scikit-learn's handwritten digits on workers of unlike speeds.

Run it with `torchrun --standalone --nproc-per-node 3 examples/digits_cnn.py`, or alone with
`python examples/digits_cnn.py`. It needs `pip install -e ".[examples]"`, in a clone of evenstep.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split

from evenstep.torch import Balancer

NUM_EPOCHS = 4
SECONDS_PER_IMAGE = 0.001


def digits():
    """1,797 images of 8 x 8 pixels, split for training and testing alike on every worker."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    everything = TensorDataset(pixels, torch.tensor(labels))
    return random_split(everything, [1500, 297], torch.Generator().manual_seed(0))


def cnn():
    """GroupNorm, not BatchNorm: a worker's own few samples make poor statistics."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


@torch.no_grad()
def accuracy(network, dataset):
    """Share of the images that are recognised."""
    images, labels = next(iter(DataLoader(dataset, batch_size=len(dataset))))
    return (network(images).argmax(dim=1) == labels).float().mean().item()


def main():
    distributed = "RANK" in os.environ  # set by torchrun
    if distributed:
        dist.init_process_group()
    rank = dist.get_rank() if distributed else 0
    torch.manual_seed(0)
    training, testing = digits()
    network = cnn()
    model = DDP(network) if distributed else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(training, batch_size=32, shuffle=True)

    balancer = Balancer()
    model, loader = balancer.prepare(model, loader)
    for epoch in range(NUM_EPOCHS):
        for images, labels in loader:
            # Stands in for unlike machines: workers 0, 1, 2 take 1, 2, 3 ms per image.
            time.sleep(SECONDS_PER_IMAGE * (1 + rank) * len(images))
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            sizes = " + ".join(map(str, balancer.batch_sizes))
            right = accuracy(network, testing)
            print(f"epoch {epoch}: {right:.1%} of the test images, batch sizes {sizes}", flush=True)

    balancer.close()
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
