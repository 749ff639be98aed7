"""Loops with several models, or with several optimizers."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional

from ._data import with_noise
from ._models import TwoHeads, critic, generator, layers, net, square
from ._pattern import Pattern
from ._update import loss_of, update


def _is(scores, real):
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))


def _gan(models, loader, optimizers, run, *, weight=lambda loss: loss):
    making, judging = models
    for_making, for_judging = optimizers
    for real, noise, _ in loader:
        for_judging.zero_grad()
        weight(_is(judging(real), 1.0)).backward()
        fake = making(noise)
        weight(_is(judging(fake.detach()), 0.0)).backward()
        for_judging.step()
        for_making.zero_grad()
        weight(_is(judging(fake), 1.0)).backward()
        for_making.step()


def gan(models, loader, optimizers, run):
    """PyTorch's DCGAN example: three backwards, the last through both models."""
    _gan(models, loader, optimizers, run)


def gan_with_weighted_losses(models, loader, optimizers, run):
    """The same with every loss weighted by hand."""
    _gan(models, loader, optimizers, run, weight=run.weight)


def _pix2pix(models, loader, optimizers, run, *, weight=lambda loss: loss):
    making, judging = models
    for_making, for_judging = optimizers
    for wanted, given, _ in loader:
        fake = making(given)
        for parameter in judging.parameters():
            parameter.requires_grad_(True)
        for_judging.zero_grad()
        loss = _is(judging(fake.detach()), 0.0) + _is(judging(wanted), 1.0)
        weight(loss * 0.5).backward()
        for_judging.step()
        for parameter in judging.parameters():
            parameter.requires_grad_(False)
        for_making.zero_grad()
        loss = _is(judging(fake), 1.0) + 10 * functional.l1_loss(fake, wanted)
        weight(loss).backward()
        for_making.step()


def image_to_image(models, loader, optimizers, run):
    """pix2pix: the generator's loss has its own output in it beside the critic's."""
    _pix2pix(models, loader, optimizers, run)


def image_to_image_with_weighted_losses(models, loader, optimizers, run):
    """The same with every loss weighted by hand."""
    _pix2pix(models, loader, optimizers, run, weight=run.weight)


def relativistic(models, loader, optimizers, run):
    """ESRGAN: the critic is frozen while the generator trains, and looks at real data too."""
    making, judging = models
    for_making, for_judging = optimizers
    for wanted, given, _ in loader:
        for parameter in judging.parameters():
            parameter.requires_grad_(False)
        for_making.zero_grad()
        fake = making(given)
        real = judging(wanted).detach()
        _is(judging(fake) - real, 1.0).backward()
        for_making.step()
        for parameter in judging.parameters():
            parameter.requires_grad_(True)
        for_judging.zero_grad()
        (_is(judging(wanted), 1.0) + _is(judging(fake.detach()), 0.0)).backward()
        for_judging.step()


def critic_more_often(models, loader, optimizers, run):
    """WGAN: the generator is trained after every second update of the critic, then clipped."""
    making, judging = models
    for_making, for_judging = optimizers
    for number, (real, noise, _) in enumerate(loader):
        for_judging.zero_grad()
        fake = making(noise).detach()
        (judging(fake).mean() - judging(real).mean()).backward()
        for_judging.step()
        for parameter in judging.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        if number % 2 == 1:
            for_making.zero_grad()
            (-judging(making(noise)).mean()).backward()
            for_making.step()


def gradient_penalty(models, loader, optimizers, run):
    """WGAN-GP: the critic's gradient between real and fake is part of its loss."""
    making, judging = models
    for_making, for_judging = optimizers
    for real, noise, share in loader:
        fake = making(noise).detach()
        between = (share * real + (1 - share) * fake).requires_grad_()
        slope = torch.autograd.grad(judging(between).sum(), between, create_graph=True)[0]
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        for_judging.zero_grad()
        loss = judging(fake).mean() - judging(real).mean() + 10 * penalty
        run.weight(loss).backward()
        for_judging.step()
        for_making.zero_grad()
        run.weight(-judging(making(noise)).mean()).backward()
        for_making.step()


def encoder_and_decoder(models, loader, optimizers, run):
    """Two models in a chain, each in a DDP of its own."""
    encoder, decoder = models
    for x, _ in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        functional.mse_loss(decoder(encoder(x)), x).backward()
        for optimizer in optimizers:
            optimizer.step()


def co_training(models, loader, optimizers, run):
    """Two models learn from the targets and from each other, in one backward."""
    first, second = models
    for x, y in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        ours, theirs = first(x), second(x)
        loss = functional.mse_loss(ours, y) + functional.mse_loss(theirs, y)
        (loss + functional.mse_loss(ours, theirs.detach())).backward()
        for optimizer in optimizers:
            optimizer.step()


def models_in_turn(models, loader, optimizers, run):
    """An ensemble: each model is trained on each batch, one after the other."""
    for batch in loader:
        for model, optimizer in zip(models, optimizers, strict=True):
            update(model, batch, optimizer)


def distillation(model, loader, optimizer, run):
    """A frozen teacher, which nobody prepares, gives half of the targets."""
    teacher = layers(4, 2, seed=7)().requires_grad_(False)
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        (functional.mse_loss(out, y) + functional.mse_loss(out, teacher(x))).backward()
        optimizer.step()


def momentum_targets(model, loader, optimizer, run):
    """BYOL: each view has to foresee what a slowly following copy makes of the other."""
    target = copy.deepcopy(getattr(model, "module", model)).requires_grad_(False)
    online = getattr(model, "module", model)
    for x, noise, _ in loader:
        views = x + 0.1 * noise, x - 0.1 * noise
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = [target(view) for view in views]
        loss = functional.mse_loss(model(views[0]), wanted[1])
        (loss + functional.mse_loss(model(views[1]), wanted[0].roll(1, 1))).backward()
        optimizer.step()
        for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)


def averaged_copy(model, loader, optimizer, run):
    """An exponential moving average of the weights, evaluated on the batch in every step."""
    online = getattr(model, "module", model)
    average = torch.optim.swa_utils.AveragedModel(online)
    for x, y in loader:
        update(model, (x, y), optimizer)
        average.update_parameters(online)
        with torch.no_grad():
            average(x)


def optimizer_for_each_part(model, loader, optimizer, run):
    """Two optimizers over the parts of one model, of which one steps every second time."""
    online = getattr(model, "module", model)
    body = torch.optim.SGD(online.body.parameters(), lr=0.02)
    heads = torch.optim.SGD([*online.first.parameters(), *online.second.parameters()], lr=0.1)
    for number, (x, y) in enumerate(loader):
        out = model(x)
        body.zero_grad()
        heads.zero_grad()
        loss = functional.mse_loss(out["first"], y)
        (loss + functional.mse_loss(out["second"], y[:, :1])).backward()
        heads.step()
        if number % 2:
            body.step()


def losses_of_two_forwards(model, loader, optimizer, run):
    """R-Drop: two forwards of each batch, a loss for each and one between them."""
    for x, noise, _ in loader:
        optimizer.zero_grad()
        first, second = model(x + 0.1 * noise), model(x - 0.1 * noise)
        loss = functional.mse_loss(first, x) + functional.mse_loss(second, x)
        (loss + functional.mse_loss(first, second)).backward()
        optimizer.step()


def fast_gradient_sign(model, loader, optimizer, run):
    """Adversarial training: the batch is moved up its own gradient, then trained on."""
    for x, y in loader:
        moved = x.clone().requires_grad_()
        with run.no_sync(model):
            (slope,) = torch.autograd.grad(loss_of(model, moved, y), moved)
        update(model, (x + 0.1 * slope.sign(), y), optimizer)


BY_HAND = "weighting='loss'"
PAIR = (generator, critic)
PATTERNS = (
    Pattern(gan, models=PAIR, data=with_noise),
    Pattern(gan_with_weighted_losses, models=PAIR, data=with_noise, weighting="loss"),
    Pattern(image_to_image, models=PAIR, data=with_noise),
    Pattern(image_to_image_with_weighted_losses, models=PAIR, data=with_noise, weighting="loss"),
    Pattern(critic_more_often, models=PAIR, data=with_noise, timed=False),
    Pattern(gradient_penalty, models=PAIR, data=with_noise, weighting="loss"),
    Pattern(encoder_and_decoder, models=(layers(4, 3, seed=8), layers(3, 4))),
    Pattern(co_training, models=(net, layers(4, 2, seed=9))),
    Pattern(models_in_turn, models=(net, layers(4, 2, seed=9))),
    Pattern(distillation),
    Pattern(momentum_targets, data=with_noise),
    Pattern(averaged_copy),
    Pattern(optimizer_for_each_part, models=(TwoHeads,)),
    Pattern(losses_of_two_forwards, models=(square,), data=with_noise),
    Pattern(fast_gradient_sign),
    Pattern(relativistic, models=PAIR, data=with_noise),
)
