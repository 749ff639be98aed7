"""From the timings of an exchange to the shares of the next: what a driver runs on rank 0.

It shows a share policy the links, and puts its shares in force as the integers of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from ..._planner import UserMistake, blaming
from ..._types import FloatArray, check_range
from ...events import (
    Event,
    ExchangeMeasured,
    LinksMeasured,
    MeasurementRejected,
    PolicyFailed,
    SharesPlanned,
)
from .._plans._aggregation import Aggregation, Links
from .._plans._duration import check_shares, exchange_s, ring_s
from .._plans._optimum import equal_shares
from .._plans._share_plan import Split, plan_shares
from .._plans._share_policies import AbstractSharePolicy, ShareDecision
from ._link_tracker import (
    LEAST_BYTES,
    LinkTracker,
    ObservedExchange,
    Transfers,
    links_alike,
    links_apart,
)
from ._share_trust import MAY_COST, PlainTrials, Probes, Trust


@final
@dataclass(frozen=True, slots=True)
class SharesInForce:
    """Who sums which part of the gradients from one step on, until a later plan replaces it.

    Attributes:
        epoch: number of the plan, from 0. It grows by one whenever the parts change, so ranks that
            name the same epoch hold the same integers.
        first_step: first optimizer step that uses it, counted over the whole run, from 0.
        parts: part of every bucket that each rank sums, as ``Split`` has them; None for
            plain all-reduce.
        predicted_s: what an exchange takes by the model, as the links were known; None before.
        reason: why, in words.
        num_exchanges: how many exchanges use the parts, at least 1; after them, plain all-reduce
            does until a later plan. None is no limit. A probe's result takes some steps to become a
            plan, and these are not to wait for slow shares.
    """

    epoch: int
    first_step: int
    parts: tuple[int, ...] | None
    predicted_s: float | None
    reason: str
    num_exchanges: int | None = None

    @property
    def shares(self) -> FloatArray | None:
        """The parts as shares that add up to 1, ``(world_size,)``; None for plain all-reduce."""
        return None if self.parts is None else np.array(self.parts) / sum(self.parts)

    def is_shared(self, num_before: int) -> bool:
        """Return whether an exchange uses the parts, after ``num_before`` under this plan."""
        is_over = self.num_exchanges is not None and num_before >= self.num_exchanges
        return self.parts is not None and not is_over


PROBE_EQUAL = 0.25  # part of a probe that goes to all alike, whatever was known of the links
MOST_PROBE = 4.0  # times all-reduce, or best shares, that a probe may take by what was known
SERVER_PROBE, LEAST_PROBED = 1.4, 0.02  # times its part that a server gets to see what it carries
SERVER_PROBE_EVERY = 25  # exchanges by shares, of which one gives some server more than its part


def links_of_servers(aggregation: Aggregation, links: Links) -> Links:
    """Return the links, those of ranks that only work so fast that they are no limit.

    What they carry is hard to distinguish from what servers let them have; no shares change it:
    those that suit the servers are as good as any, at least in many chunks.
    """
    only_work = aggregation.is_worker & ~aggregation.is_server
    up, down = links.up_bytes_per_s, links.down_bytes_per_s
    return replace(
        links,
        up_bytes_per_s=np.where(only_work, up.sum(), up),
        down_bytes_per_s=np.where(only_work, down.sum(), down),
    )


NUM_PLAIN = 2  # exchanges at the start by all-reduce: what shares have to beat is measured first
LEAST_GAIN = 0.05  # of what shares in force take on the links as they are: what new ones must save
LOSSES = 3  # comparisons in a row that shares have to lose to all-reduce, as links may be in doubt
STAYS = 0.02  # gain over all-reduce below which shares in force end
MEASURED = 1 / 3  # of the margin by which shares have to win that were tried
NUM_OF_PROBE = 3  # exchanges of a probe: one that shows the links, and two by what it showed
HOPELESS = 1.5  # times all-reduce: a probe that promises no better is over after one exchange
REPORTED = 0.1  # a change of some link by which part is worth an event


@final
class SharePlanner:
    """Runs a share policy over the exchanges of a training run, and checks its predictions.

    - It begins with plain all-reduce, measures it, and probes the links.
    - A probe is up to three exchanges: one by equal shares, or by the links known so far, and two
      by shares that suit its result, unless these promise nothing, or the first of the two took
      longer than all-reduce. Shares stay if all-reduce took longer than the better one of these by
      ``margin``, or by a third of it if servers have no data and their links look slow. What an
      exchange shows takes steps to become a plan. These are summed by all-reduce, unless the model
      promises a gain, or servers have no data: they report an exchange when the next begins.
    - Every exchange by shares adds to what is known of the links (``LinkTracker``). New shares are
      adopted if the current ones would take 5 % longer on the servers' current links.
    - All-reduce replaces the shares if they would not win by 2 % three times in a row. Measured
      times correct the models of both.
    - All-reduce also replaces them if five predictions in a row are wrong by a factor of 1.35, and
      exchanges were slower than all-reduce.
    - In one exchange of 25, one server gets 1.4 times its part, in turns, to measure its link,
      if 2 % of what exchanges took make up for it.
    - Servers without data hide what workers' links carry. So one exchange tries all-reduce some
      steps after links changed, unless some worker is slower than others.
    - All-reduce shows nothing about links. So while it is in force there are probes: if its time
      changes, if it takes longer than shares that lost to it, and after 50, then 100, ... and at
      most 1600 steps, or later if probes would cost more than 2 % (``Probes``).
    - A time of all-reduce that is impossible on the known links is refused, unless five in a row
      agree.

    It reads no clock and sends nothing. It gets exchanges and returns plans and events.

    Args:
        policy: decides the shares.
        aggregation: what is summed, on which ranks, in how many chunks.
        margin: the gain over plain all-reduce that shares need, at least 0.

    Attributes:
        plan: the plan in force from ``plan.first_step`` on; the very same object until another one
            follows.
        aggregation: as above.

    Raises:
        ValueError: ``margin`` is out of range.
    """

    def __init__(
        self,
        policy: AbstractSharePolicy[Any],
        aggregation: Aggregation,
        *,
        margin: float = 0.15,
    ) -> None:
        check_range("SharePlanner(margin=...)", margin, "finite and at least 0", "0.15 is 15 %.")
        self.aggregation, self._margin = aggregation, margin
        self._policy, self._state = policy, policy.init(aggregation)
        self._trust = Trust()
        self._probes, self._plain_trials = Probes(), PlainTrials()
        self._num_seen = self._num_lost = 0
        self._servers = np.flatnonzero(aggregation.is_server).tolist()
        self._num_shared, self._saved = 0, 0.0  # for probes of servers, in exchanges
        self._is_server_probe = False  # the last plan is in force, but for one server's part
        self._probe_no = 0  # exchanges of the probe under way, this one included; 0 without one
        self._reported: Links | None = None
        self._belief: LinkTracker | None = None
        self._helped = aggregation.num_workers < aggregation.world_size
        self._useful = aggregation.num_workers > (1 if self._helped else 2)
        why = "to measure what shares have to beat"
        why = why if self._useful else "no shares are faster among so few workers"
        self.plan = SharesInForce(0, 0, None, None, f"plain all-reduce: {why}")

    @property
    def links(self) -> Links | None:
        """The estimated links; None before anything is known."""
        return None if self._belief is None else self._belief.links

    def observe(self, step: int, exchange: ObservedExchange, *, next_step: int) -> list[Event]:
        """Take in the exchange of one step, plan anew, and return what that says, in order.

        Impossible figures are named in an event and left out; so is a user's policy that fails.

        Args:
            step: the step that was measured.
            exchange: its exchange, all buckets together.
            next_step: the first step that can still use a new plan.

        Raises:
            ValueError: its transfers are of other ranks.
        """
        if problem := exchange.problem() or self._impossible(exchange):
            return [MeasurementRejected(step, *problem)]
        self._num_seen += 1
        events = self._learn(step, exchange)
        newest = exchange.plan_epoch == self.plan.epoch
        if newest and self._useful and self._num_seen >= NUM_PLAIN:
            try:
                events += self._decide(exchange, next_step)
            except UserMistake as mistake:  # training continues
                events.append(PolicyFailed(step, str(mistake), mistake.part))
                if self._probe_no and self.links is not None:  # that was for few exchanges only
                    reason = "plain all-reduce: the policy failed after probing the links"
                    events += self._fall_back(next_step, self.links, reason)
                elif self.plan.parts is None:  # it is asked again when the next probe is due
                    self._probes.done(self._trust.plain_s, changed=False)
        return events

    def _impossible(self, exchange: ObservedExchange) -> tuple[int, str] | None:
        """Return what is wrong with an all-reduce, if known links are too slow for it."""
        if exchange.transfers is not None or self.links is None or self._probe_no:
            return None
        least_s = ring_s(self.aggregation, self.links)
        return self._trust.problem(exchange.exchange_s, least_s, self.aggregation.num_bytes)

    def _learn(self, step: int, exchange: ObservedExchange) -> list[Event]:
        """Take in how long it took, and what that says of links."""
        events: list[Event] = []
        took_s, predicted_s = exchange.exchange_s, None
        if exchange.transfers is None:
            self._trust.see_plain(took_s)
        else:
            if self._probe_no or self.plan.parts is None:  # and those begun before it ended
                self._probes.spend(took_s - (self._trust.plain_s or took_s))
            self._follow(exchange.transfers)
            events += self._report_links(step)
        if self.links is not None and exchange.plan_epoch == self.plan.epoch:
            shares = None if exchange.transfers is None else self.plan.shares
            predicted_s = self._seconds(self.links, shares)
            if shares is not None and predicted_s > 0:
                self._trust.see_shares(took_s, predicted_s, plan_epoch=self.plan.epoch)
            self._trust.compare_plain(self._seconds(self.links, None))
        return [*events, ExchangeMeasured(step, exchange.plan_epoch, took_s, predicted_s)]

    def _follow(self, transfers: Transfers) -> None:
        if not transfers.seen(1).any():
            return  # ranges too short to be timed
        if self._belief is not None:
            only_serves = ~self.aggregation.is_worker
            self._belief = self._belief.update(transfers, only_serves=only_serves)
            if self._belief.changed(self.aggregation.is_server):
                self._plain_trials.changed()
            self._plain_trials.see(transfers.rates()[:, self.aggregation.is_worker])
        elif transfers.seen(LEAST_BYTES).any():
            self._belief = LinkTracker.first(transfers)

    def _report_links(self, step: int) -> list[Event]:
        """Return the links as a fact, if they are other than when they were last reported."""
        links = self.links
        if links is None or (
            self._reported is not None and links_apart(links, self._reported) < REPORTED
        ):
            return []
        self._reported = links
        up, down = links.up_bytes_per_s.tolist(), links.down_bytes_per_s.tolist()
        return [LinksMeasured(step, tuple(up), tuple(down))]

    def _decide(self, exchange: ObservedExchange, next_step: int) -> list[Event]:
        """Return the plan that follows, if it is another one."""
        links = self.links
        if self.plan.parts is None:
            if links is not None and self._probe_no:
                return self._after_plain(links, next_step)
            due = self._probes.due(exchange.exchange_s)
            return [] if due is None else self._probe(next_step, due)
        if links is None or exchange.transfers is None:
            self._probes.done(self._trust.plain_s, changed=False)
            why = "the exchange is too small to measure links"
            if exchange.transfers is None:
                why = "no exchange of the probe could be read"
            return self._adopt(next_step, None, self._trust.plain_s, f"plain all-reduce: {why}")
        if self._probe_no:
            return self._after_probe(links, next_step)
        if complaint := self._trust.complaint(ring_s(self.aggregation, links)):
            return self._fall_back(next_step, links, complaint)
        return (
            self._plan_again(links, next_step)
            or self._try_plain(next_step)
            or self._probe_server(links, next_step)
        )

    def _probe(self, next_step: int, reason: str) -> list[Event]:
        """Have an exchange that shows the links: by equal shares, or nearer to what was best."""
        self._trust.forget_shares()
        links, shares, predicted_s = self.links, equal_shares(self.aggregation), None
        if links is not None:
            shares = self._shares_to_probe(links)
            predicted_s = self._seconds(links, shares)
        parts = Split.of(shares).parts
        return self._adopt(next_step, parts, predicted_s, reason, probe_no=1, is_brief=True)

    def _shares_to_probe(self, links: Links) -> FloatArray:
        """Return shares that are the nearer to the best, the longer equal ones would take.

        A link that is known to be slow would keep all waiting.
        """
        equal, best = equal_shares(self.aggregation), self._decided(links).shares
        most_s = MOST_PROBE * max(self._seconds(links, None), self._seconds(links, best))
        for halvings in range(8):
            part = PROBE_EQUAL / 2**halvings
            probed: FloatArray = part * equal + (1 - part) * best
            if self._seconds(links, probed) <= most_s:
                break
        return probed

    def _after_probe(self, links: Links, next_step: int) -> list[Event]:
        """Act on what a probe showed: its better exchange decides; slower shares end soon."""
        number, decision = self._probe_no, self._decided(links)
        margin = self._margin * (MEASURED if self._helped else 1.0)
        shares_s = self._trust.best_of(max(1, number - 1))
        wins, reason = self._trust.compared(shares_s, margin)
        at_best_s = self._seconds_of_servers(links, decision.shares)
        is_sure = number > 1 or self._trust.promises(at_best_s, 1 / (1 + margin))
        if number > 1:  # once more, if all-reduce took longer
            goes_on = number < NUM_OF_PROBE and not wins and self._trust.compared(shares_s, 0.0)[0]
        elif self._helped or not links_alike(links):
            # A link that was not the limit looks slower than it is: shares may be faster than that.
            goes_on = is_sure or self._trust.promises(at_best_s, HOPELESS)
        else:  # none hides another, and the model is all there is
            goes_on = is_sure
        if goes_on:
            reason, number = "probing the links: shares for the links as last known", number + 1
            return self._share(decision, links, next_step, reason, number, is_brief=not is_sure)
        if wins:
            return self._begin(decision, links, next_step, reason)
        return self._fall_back(next_step, links, reason, shares_s)

    def _after_plain(self, links: Links, next_step: int) -> list[Event]:
        """Decide between an all-reduce just tried and the shares before it."""
        shares_s = self._trust.usual_of(3)
        wins, reason = self._trust.compared(shares_s, min(STAYS, self._margin))
        self._plain_trials.done(faster=not wins)
        if wins:
            return self._begin(self._decided(links), links, next_step, reason)
        return self._fall_back(next_step, links, reason, shares_s)

    def _try_plain(self, next_step: int) -> list[Event]:
        """Have one plain all-reduce, where it might be faster by now than is known."""
        if not (self._helped and self._plain_trials.due()):
            return []
        self._trust.forget_plain()
        reason = "plain all-reduce: measuring what it takes now"
        return self._adopt(next_step, None, None, reason, probe_no=1)

    def _probe_server(self, links: Links, next_step: int) -> list[Event]:
        """Give one server more than its part for one exchange of 25, in turns.

        A link shows no more than it is asked for, and a server that nothing goes to shows nothing.
        One that is known to be very slow would keep all waiting: its turn is left out until 2 % of
        what exchanges took make up for it.
        """
        self._num_shared += 1
        self._saved += MAY_COST
        turn, left = divmod(self._num_shared, SERVER_PROBE_EVERY)
        if left or len(self._servers) < 2:
            return []
        assert self.plan.shares is not None
        rank, shares = self._servers[turn % len(self._servers)], self.plan.shares.copy()
        shares[rank] = max(SERVER_PROBE * shares[rank], LEAST_PROBED)
        shares /= shares.sum()
        seconds = self._seconds(links, shares)
        cost = seconds / self._seconds(links, self.plan.shares) - 1
        if cost > self._saved:
            return []
        self._saved -= cost
        reason = f"probing rank {rank}: whether its link carries more than it is asked for"
        events = self._adopt(next_step, Split.of(shares).parts, seconds, reason)
        self._is_server_probe = True
        return events

    def _plan_again(self, links: Links, next_step: int) -> list[Event]:
        """Decide between the shares in force, others and all-reduce."""
        decision = self._decided(links)
        stays = min(STAYS, self._margin)
        plan = plan_shares(self.aggregation, links, shares=decision.shares, margin=stays)
        wins, reason = self._trust.judge(plan, stays)
        self._num_lost = 0 if wins else self._num_lost + 1
        if self._num_lost >= LOSSES:
            return self._fall_back(next_step, links, reason, self._trust.usual_of(3))
        if self._is_server_probe:
            return self._adopt(next_step, plan.parts, plan.exchange_s, reason)
        assert self.plan.shares is not None
        held_s = self._seconds_of_servers(links, self.plan.shares)
        best_s = self._seconds_of_servers(links, plan.shares)
        if not wins or held_s <= best_s * (1 + LEAST_GAIN):
            return []
        self._state = decision.state
        return self._adopt(next_step, plan.parts, plan.exchange_s, reason)

    def _decided(self, links: Links) -> ShareDecision[Any]:
        """Return what the policy decides on links, whatever those carry that have no share.

        Raises:
            UserMistake: a user's policy raised, or what it gave are no shares.
        """
        hopeful = links_of_servers(self.aggregation, links)
        with blaming(self._policy):
            decision = self._policy.update(self.aggregation, hopeful, self._state)
            check_shares("plan_shares", self.aggregation, decision.shares)
        return decision

    def _seconds(self, links: Links, shares: FloatArray | None) -> float:
        """Return what an exchange takes, by a ring without shares."""
        if shares is None:
            return ring_s(self.aggregation, links)
        return exchange_s(self.aggregation, links, shares=shares)

    def _seconds_of_servers(self, links: Links, shares: FloatArray) -> float:
        """Return what an exchange takes if ranks that only work are no limit."""
        return self._seconds(links_of_servers(self.aggregation, links), shares)

    def _begin(
        self, decision: ShareDecision[Any], links: Links, next_step: int, reason: str
    ) -> list[Event]:
        """Go over to shares, or stay with them after a trial of all-reduce."""
        self._probes.done(None, changed=True)
        self._state = decision.state
        return self._share(decision, links, next_step, reason)

    def _share(
        self,
        decision: ShareDecision[Any],
        links: Links,
        next_step: int,
        reason: str,
        probe_no: int = 0,
        *,
        is_brief: bool = False,
    ) -> list[Event]:
        parts = Split.of(decision.shares).parts
        seconds = self._seconds(links, decision.shares)
        return self._adopt(next_step, parts, seconds, reason, probe_no=probe_no, is_brief=is_brief)

    def _fall_back(
        self, next_step: int, links: Links, reason: str, shares_s: float | None = None
    ) -> list[Event]:
        plain_s = ring_s(self.aggregation, links) * self._trust.plain_factor
        self._probes.done(plain_s, changed=False, shares_s=shares_s)
        return self._adopt(next_step, None, plain_s, reason)

    def _adopt(
        self,
        next_step: int,
        parts: tuple[int, ...] | None,
        predicted_s: float | None,
        reason: str,
        *,
        probe_no: int = 0,
        is_brief: bool = False,
    ) -> list[Event]:
        """Put a plan in force, under the next number; a brief one for a single exchange."""
        self._probe_no, self._is_server_probe, self._num_lost = probe_no, False, 0
        number = 1 if is_brief and not self._helped else None
        epoch = self.plan.epoch + 1
        self.plan = SharesInForce(epoch, next_step, parts, predicted_s, reason, number)
        plain_s = self._trust.plain_s
        return [SharesPlanned(next_step, self.plan.epoch, parts, predicted_s, plain_s, reason)]
