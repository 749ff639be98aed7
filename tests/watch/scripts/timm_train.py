import argparse
import logging

import torch
import torch.nn as nn
from timm.data import create_dataset, create_loader
from timm.models import create_model
from torch.nn.parallel import DistributedDataParallel as NativeDDP

try:
    from apex.parallel import DistributedDataParallel as ApexDDP

    has_apex = True
except ImportError:
    has_apex = False

_logger = logging.getLogger("train")


def main():
    args = argparse.Namespace(distributed=True, no_ddp_bb=True, dist_bn="")
    model = create_model("resnet18")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model_ema = None

    # setup distributed training
    if args.distributed:
        if has_apex:
            model = ApexDDP(model, delay_allreduce=True)
        else:
            model = NativeDDP(model, device_ids=[0], broadcast_buffers=not args.no_ddp_bb)
        # NOTE: EMA model does not need to be wrapped by DDP

    dataset_train = create_dataset("folder", root="train")
    dataset_eval = create_dataset("folder", root="val")

    loader_train = create_loader(
        dataset_train,
        input_size=224,
        batch_size=32,
        is_training=True,
        distributed=args.distributed,
    )

    loader_eval = create_loader(dataset_eval, input_size=224, batch_size=32)

    updates_per_epoch = (len(loader_train) + 1 - 1) // 1
    for epoch in range(2):
        train_one_epoch(epoch, model, loader_train, optimizer, args)


def train_one_epoch(epoch, model, loader, optimizer, args):
    for batch_idx, (input, target) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(input), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
