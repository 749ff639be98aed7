"""A small classifier in Accelerate's own loop, with accumulation, clipping and a schedule.

Once plain and once balanced, as the file's name says. Start it with `torchrun --standalone
--nproc-per-node 2` or `accelerate launch`, and its name.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.huggingface import balance


def rings(num_samples):
    """Made-up data: points on a plane, and on which of three rings each lies."""
    x = 3 * torch.rand(num_samples, 2, generator=torch.Generator().manual_seed(0)) - 1.5
    return TensorDataset(x, x.norm(dim=1).clamp(max=1.49).div(0.5).long())


def main():
    on_cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    dataset = rings(4096)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    held_out = DataLoader(rings(1000), batch_size=50)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    model, loader = balance(accelerator, model, loader)

    for epoch in range(4):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {len(loader)} batches")

    right = []
    with torch.no_grad():
        for x, y in held_out:
            right.append(accelerator.gather_for_metrics(model(x).argmax(dim=1) == y))
    share = 100 * torch.cat(right).float().mean().item()
    accelerator.print(f"right on {sum(map(len, right))} points: {share:.1f}%")
    accelerator.end_training()


if __name__ == "__main__":
    main()
