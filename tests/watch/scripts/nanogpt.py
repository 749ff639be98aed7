import os

import numpy as np
import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")


def get_batch(split):
    data = np.random.rand(8, 8)
    return torch.from_numpy(data).float(), torch.zeros(8, 1)


model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
if ddp:
    model = DDP(model)
X, Y = get_batch("train")
for iter_num in range(4):
    loss = torch.nn.functional.mse_loss(model(X), Y)
    X, Y = get_batch("train")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print("trained")
