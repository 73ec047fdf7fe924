"""Goal: learners train apart and agree on every outer step; what each moved counts once.

Method: NumPy loops, each a learner with moves that are small whole numbers, so that float32 adds
them exactly, and plain outer SGD of rate 1: the image is then the mean of the local weights.
"""

from __future__ import annotations

import contextlib
import signal
import threading

import numpy as np
import pytest

import shardwell
from harness.faults.interrupts import Interrupt
from harness.polling import BRIEF_S, eventually
from harness.threads import in_background, together
from shardwell.outer.fragment import Offer

SHAPES = {f"layers.{n}.w": (3, 4) for n in range(4)}
EXACT = {"outer": shardwell.SGD(1.0), "codec": "fp32", "sync_every": 4}


def filled(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def learner(client: shardwell.Client, **options) -> shardwell.Outer:
    return shardwell.Outer(client, "net", tensors=SHAPES, **{**EXACT, **options})


def move(weights: dict[str, np.ndarray], by: float) -> None:
    for array in weights.values():
        array += np.float32(by)


def loop(outer: shardwell.Outer, weights: dict[str, np.ndarray], by: float, count: int) -> None:
    for _ in range(count):
        move(weights, by)
        weights.update(outer.after_step(weights))


def steps(outer: shardwell.Outer) -> list[int]:
    return [each.step for each in outer.fragments]


def versions(outer: shardwell.Outer) -> list[int]:
    return [each.version for each in outer.fragments]


def offer_of(outer: shardwell.Outer) -> Offer:
    offer = outer._fragments[0].offer
    assert offer is not None
    return offer


def value(weights: dict[str, np.ndarray], layer: int) -> float:
    (found,) = np.unique(weights[f"layers.{layer}.w"])
    return float(found)


# First weights.


def test_learners_that_begin_at_once_have_one_learner_s_weights(cluster, connect) -> None:
    target = cluster(2).target
    for attempt in range(5):
        clients = [connect(target, f"w{n}-{attempt}") for n in range(3)]

        def begin(number: int, clients=clients, attempt=attempt) -> dict[str, np.ndarray]:
            outer = shardwell.Outer(
                clients[number], f"net{attempt}", tensors=SHAPES, worker_count=3, **EXACT
            )
            return outer.init(filled(number))

        found = together([lambda n=n: begin(n) for n in range(3)])
        values = {value(each, layer) for each in found for layer in range(4)}
        assert len(values) == 1, values


def test_who_has_the_same_weights_ends_what_another_began(cluster, connect, monkeypatch) -> None:
    target = cluster(2).target
    cut_off = learner(connect(target, "w0"), worker_count=3)

    def cut(*_, **__) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cut_off._fragments[2].parameter, "restore", cut)
    with pytest.raises(KeyboardInterrupt):
        cut_off.init(filled(3))
    other = learner(connect(target, "w1"), worker_count=3, timeout_s=0.3)
    with pytest.raises(
        shardwell.NotInitializedError, match=r"fragment 2 of 'net' has no first weights.*same we"
    ):
        other.init(filled(5))
    waiting = in_background(lambda: learner(connect(target, "w2"), worker_count=3).init(filled(7)))
    again = learner(connect(target, "w0"), worker_count=3)
    found = again.init(filled(3))
    assert {value(found, layer) for layer in range(4)} == {3.0}
    assert {value(waiting.result(40), layer) for layer in range(4)} == {3.0}


def test_inner_steps_before_init_are_refused(cluster, connect) -> None:
    outer = learner(connect(cluster(1), "w0"))
    with pytest.raises(shardwell.NotInitializedError, match=r"'net': call init\(weights\)"):
        outer.after_step(filled(0))
    with pytest.raises(shardwell.NotInitializedError, match=r"'net' has no first weights"):
        outer.reload()


# Several learners.


def test_outer_steps_are_means_by_samples(cluster, connect) -> None:
    """Each fragment is due in turn, and is the mean of what the learners moved until then."""
    target = cluster(3).target
    outers = [learner(connect(target, f"w{n}"), worker_count=3) for n in range(3)]
    trained = [outer.init(filled(0)) for outer in outers]
    counts = (1, 1, 2)

    def run(number: int) -> None:
        for _ in range(4):
            move(trained[number], 4.0 * number)
            changed = outers[number].after_step(trained[number], sample_count=counts[number])
            trained[number].update(changed)

    together([lambda n=n: run(n) for n in range(3)])
    # Moves of 0, 4 and 8 an inner step, weighted by 1, 1 and 2: the mean is 5 an inner step. Layer
    # n is due after inner step n + 1, and then moves on in each learner by itself.
    for layer in range(4):
        assert value(outers[0].image(), layer) == 5.0 * (layer + 1)
        for number, weights in enumerate(trained):
            assert value(weights, layer) == 5.0 * (layer + 1) + 4.0 * number * (3 - layer)
    assert [versions(outer) for outer in outers] == [[1, 1, 1, 1]] * 3


def test_int8_learners_hold_the_same_bits(cluster, connect) -> None:
    """At each version; what rounding takes off stays to be sent."""
    target, draw = cluster(2).target, np.random.default_rng(3)
    options = {"worker_count": 2, "codec": "int8", "fragments": 2, "overlap": 1}
    outers = [learner(connect(target, f"w{n}"), **options) for n in range(2)]
    trained = [outer.init(filled(1)) for outer in outers]
    moves = draw.standard_normal((2, 24, 3, 4)).astype(np.float32)
    images: list[list[dict[str, np.ndarray]]] = [[], []]

    def run(number: int) -> None:
        for each in moves[number]:
            for array in trained[number].values():
                array += each
            changed = outers[number].after_step(trained[number])
            trained[number].update(changed)
            if changed:
                images[number].append(outers[number].image())

    together([lambda: run(0), lambda: run(1)])
    assert len(images[0]) == len(images[1]) == 12
    for mine, others in zip(*images, strict=True):
        for name in SHAPES:
            assert np.array_equal(mine[name], others[name])
    state = outers[0].state_dict()
    assert any(np.abs(each["residual"]).max() > 0 for each in state["fragments"])


def test_bytes_are_those_of_the_fragments(cluster, connect) -> None:
    """In sync_every inner steps each element goes up once and comes down once."""
    client = connect(cluster(2), "w0", same_host=False)
    shapes = {f"layers.{n}.w": (20_000,) for n in range(4)}
    outer = shardwell.Outer(client, "large", tensors=shapes, sync_every=20)
    weights = outer.init({n: np.zeros(s, np.float32) for n, s in shapes.items()})
    loop(outer, weights, 1.0, 20)  # whose weights come whole once
    before = client.traffic.sent_bytes, client.traffic.received_bytes
    loop(outer, weights, 1.0, 20)
    sent, received = client.traffic.sent_bytes, client.traffic.received_bytes
    assert 80_000 <= sent - before[0] < 90_000 + 8_000
    assert 80_000 <= received - before[1] < 90_000 + 8_000


def test_training_goes_on_while_a_fragment_travels(cluster, connect) -> None:
    target = cluster(2).target
    options = {"worker_count": 2, "sync_every": 8, "fragments": 2, "overlap": 3}
    first, second = (learner(connect(target, f"w{n}"), **options) for n in (0, 1))
    weights, others = first.init(filled(0)), second.init(filled(0))
    loop(first, weights, 2.0, 1)
    assert [each.is_offered for each in first.fragments] == [True, False]
    loop(first, weights, 2.0, 2)  # it waits for no learner
    assert first.waited_s == 0.0
    assert versions(first) == [0, 0]
    together([lambda: loop(first, weights, 2.0, 1), lambda: loop(second, others, 4.0, 4)])
    # Both moved by one inner step when they offered; what came after is not part of it.
    assert value(weights, 0) == value(others, 0) == 3.0
    assert value(weights, 1) == 8.0
    assert first.hidden_s > 0.0
    assert first.offered_count == 1


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_alpha_keeps_a_part_of_the_local_weights(cluster, connect, alpha: float) -> None:
    outer = learner(connect(cluster(2), "w0"), alpha=alpha, overlap=1, sync_every=8)
    weights = outer.init(filled(0))
    loop(outer, weights, 8.0, 2)
    assert value(weights, 0) == (1 - alpha) * 8.0 + alpha * 16.0
    assert value(outer.image(), 0) == 8.0


def test_what_comes_later_is_taken_later(cluster, connect) -> None:
    target = cluster(2).target
    options = {"worker_count": 2, "sync_every": 8, "fragments": 2}
    first = learner(connect(target, "w0"), overdue="later", **options)
    second = learner(connect(target, "w1"), **options)
    weights, others = first.init(filled(0)), second.init(filled(0))
    loop(first, weights, 2.0, 6)  # no other has offered anything
    assert first.overdue_count == 1
    assert versions(first) == [0, 0]
    loop(second, others, 4.0, 4)
    eventually("the result is here", lambda: offer_of(first).state == "come")
    move(weights, 2.0)
    weights.update(first.after_step(weights))
    assert versions(first) == [1, 0]
    assert value(weights, 0) == value(second.image(), 0) == (8.0 + 16.0) / 2


def test_a_fragment_that_is_open_when_it_is_due_again_is_waited_for(cluster, connect) -> None:
    target = cluster(2).target
    options = {"worker_count": 2, "sync_every": 2, "fragments": 1, "overdue": "later"}
    first, second = (learner(connect(target, f"w{n}"), **options) for n in (0, 1))
    weights, others = first.init(filled(0)), second.init(filled(0))
    loop(first, weights, 1.0, 3)
    waits = in_background(lambda: loop(first, weights, 1.0, 1))
    loop(second, others, 3.0, 2)
    waits.result(40)
    assert versions(first) == [1]
    assert steps(first) == [1]
    assert first.fragments[0].is_offered
    second.close()


def test_offers_and_takes_by_hand(cluster, connect) -> None:
    outer = learner(connect(cluster(2), "w0"))
    weights = outer.init(filled(1))
    move(weights, 2.0)
    outer.offer(2, weights, sample_count=5)
    with pytest.raises(shardwell.ArgumentError, match=r"fragment 2 of 'net' is offered already"):
        outer.offer(2, weights)
    with pytest.raises(shardwell.ArgumentError, match=r"fragment 0 of 'net' is not offered"):
        outer.take(0, weights)
    assert list(outer.take(2)) == ["layers.2.w"]
    assert versions(outer) == [0, 0, 1, 0]
    for wrong in (4, -1, "first", None):
        with pytest.raises(shardwell.ArgumentError, match=r"fragment must be an integer from 0 t"):
            outer.offer(wrong, weights)  # type: ignore[arg-type]


def test_what_is_returned_is_the_caller_s(cluster, connect) -> None:
    outer = learner(connect(cluster(2), "w0"))
    weights = outer.init(filled(0))
    loop(outer, weights, 1.0, 4)
    image = outer.image()
    for array in [*weights.values(), *outer.image().values()]:
        array[...] = 99.0
    assert {value(outer.image(), n) for n in range(4)} == {value(image, n) for n in range(4)}


# Learners whose offers do not count.


def test_work_that_did_not_count_is_kept(cluster, connect) -> None:
    """A late learner's local weights keep what it moved, and its next offer has it."""
    target = cluster(2).target
    options = {"worker_count": 2, "min_contributors": 1, "fragments": 1, "sync_every": 1}
    first, second = (learner(connect(target, f"w{n}"), **options) for n in (0, 1))
    weights, others = first.init(filled(0)), second.init(filled(0))
    loop(first, weights, 2.0, 1)  # closes alone
    loop(second, others, 10.0, 1)
    assert second.kept_count == 1
    assert value(second.image(), 0) == 2.0
    assert value(others, 0) == 12.0
    # Its next one has both moves, and the samples of both.
    before = second.fragments[0].step
    loop(second, others, 6.0, 1)
    assert second.fragments[0].step == before + 1
    assert value(others, 0) == value(second.image(), 0) == 18.0
    assert second.kept_count == 1


def test_samples_of_kept_work_are_kept(cluster, connect) -> None:
    target = cluster(2).target
    options = {"worker_count": 2, "fragments": 1, "sync_every": 1}
    open_sets = {"min_contributors": 1, "grace_s": 20.0}
    first, second = (learner(connect(target, f"w{n}"), **options, **open_sets) for n in (0, 1))
    weights, others = first.init(filled(0)), second.init(filled(0))
    second._fragments[0].sample_count = 3  # as of three samples whose offer did not count
    move(others, 8.0)

    def run(outer, own, by: float) -> None:
        move(own, by)
        own.update(outer.after_step(own))

    together([lambda: run(first, weights, 10.0), lambda: run(second, others, 0.0)])
    assert value(weights, 0) == pytest.approx((10.0 + 4 * 8.0) / 5, rel=1e-6)


# Learners that come and go.


def in_step(*outers: shardwell.Outer) -> None:
    """Has all of them await one another from the second round on."""
    for outer in outers:
        for fragment in outer._fragments:
            fragment.parameter.join(waits=False)


def elastic(client: shardwell.Client, **options) -> shardwell.Outer:
    return learner(client, members=shardwell.Elastic(min_count=1, max_count=4), **options)


def test_a_newcomer_begins_behind_the_fragment_that_was_given_last(cluster, connect) -> None:
    target = cluster(2).target
    first = elastic(connect(target, "w0"))
    weights = first.init(filled(0))
    loop(first, weights, 1.0, 6)
    assert versions(first) == [2, 2, 1, 1]
    second = elastic(connect(target, "w1"))
    others = second.init(filled(99))
    assert versions(second) == [2, 2, 1, 1]
    assert [value(others, n) for n in range(4)] == [5.0, 6.0, 3.0, 4.0]
    loop(first, weights, 1.0, 1)  # does not wait for it
    assert versions(first) == [2, 2, 2, 1]
    assert second.fragments[2].version == 1
    # Its own offer is late, so it keeps its work and goes on with the others.
    loop(second, others, 10.0, 1)
    assert versions(second) == [2, 2, 2, 1]
    assert second.kept_count == 1
    assert value(others, 2) == 7.0 + 10.0
    # No learner waits for it before the next round of what it has joined.
    loop(first, weights, 1.0, 4)
    assert versions(first) == [3, 3, 3, 2]
    waits = in_background(lambda: loop(first, weights, 1.0, 1))
    loop(second, others, 10.0, 5)
    waits.result(40)
    assert versions(first) == versions(second) == [3, 3, 3, 3]
    for layer in range(4):
        assert value(first.image(), layer) == value(second.image(), layer)


def test_several_that_come_and_go_never_wait_in_a_ring(cluster, connect) -> None:
    """Newcomers at every inner step of the others; all make many outer steps and leave."""
    target = cluster(2).target
    clients = [connect(target, f"w{n}") for n in range(4)]
    begin = [threading.Event() for _ in range(4)]
    begin[0].set()

    def run(number: int) -> int:
        begin[number].wait(40)
        outer = elastic(clients[number])
        weights = outer.init(filled(number))
        for step in range(30):
            move(weights, 1.0)
            weights.update(outer.after_step(weights))
            if number < 3 and step == 1 + number:
                begin[number + 1].set()
        outer.leave()
        return min(versions(outer))

    assert min(together([lambda n=n: run(n) for n in range(4)])) >= 7


def test_who_was_away_goes_on_from_the_newest_image(cluster, connect) -> None:
    """One that missed many outer steps is in step again with its next take, and keeps its work."""
    target = cluster(2).target
    first, second = (elastic(connect(target, f"w{n}")) for n in (0, 1))
    weights, others = first.init(filled(0)), second.init(filled(0))
    in_step(first, second)
    together([lambda: loop(first, weights, 1.0, 8), lambda: loop(second, others, 1.0, 8)])
    assert versions(first) == versions(second) == [2, 2, 2, 2]
    kept_count = second.kept_count
    second.leave()  # as if it was lost: its next offer takes part anew
    loop(first, weights, 1.0, 14)
    newest = versions(first)
    assert newest == [6, 6, 5, 5]
    old = second.image()
    moved = {name: others[name] - old[name] + 5.0 for name in SHAPES}
    loop(second, others, 5.0, 1)
    assert versions(second) == newest
    assert second.kept_count == kept_count + 1
    for name in SHAPES:
        assert np.array_equal(others[name], first.image()[name] + moved[name])
    together([lambda: loop(first, weights, 1.0, 8), lambda: loop(second, others, 1.0, 8)])
    assert versions(first) == versions(second)
    # At most all offers of the round in which the other did not await it yet.
    assert second.kept_count <= kept_count + 5


def test_no_learner_waits_for_one_that_has_left(cluster, connect) -> None:
    target = cluster(2).target
    first, second = (elastic(connect(target, f"w{n}")) for n in (0, 1))
    weights, others = first.init(filled(0)), second.init(filled(0))
    in_step(first, second)
    together([lambda: loop(first, weights, 1.0, 8), lambda: loop(second, others, 1.0, 8)])
    second.leave()
    loop(first, weights, 1.0, 8)
    assert versions(first) == [4, 4, 4, 4]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_end_of_a_block_leaves(cluster, connect, error) -> None:
    """Though the client stays open, which would have said that the learner lives."""
    target = cluster(2).target
    client = connect(target, "w1")
    first, second = elastic(connect(target, "w0")), elastic(client)
    weights = first.init(filled(0))
    with pytest.raises(KeyboardInterrupt) if error else contextlib.nullcontext(), second:
        others = second.init(filled(0))
        in_step(first, second)
        together([lambda: loop(first, weights, 1.0, 8), lambda: loop(second, others, 1.0, 8)])
        if error:
            raise error
    loop(first, weights, 1.0, 8)
    assert versions(first) == [4, 4, 4, 4]
    again = elastic(client)
    again.init(filled(0))
    assert versions(again) == [4, 4, 4, 4]


def test_who_leaves_waits_for_its_offers_no_longer_than_it_says(cluster, connect) -> None:
    """And takes its leave of the other fragments all the same."""
    target = cluster(2).target
    client = connect(target, "w0")
    outer = learner(client, members=shardwell.Elastic(min_count=2, max_count=4))
    weights = outer.init(filled(0))
    outer.offer(0, weights)
    with pytest.raises(shardwell.DeadlineError, match=r"net\.fragment-0"):
        outer.leave(timeout_s=0.3)
    for fragment in (1, 2, 3):
        assert [each.state for each in client.members(f"net.fragment-{fragment}")] == ["over"]


# Waiting, and its end.


def test_a_wait_names_the_learner_and_may_be_made_again(cluster, connect) -> None:
    target = cluster(2).target
    options = {"worker_count": 2, "fragments": 2, "sync_every": 2, "timeout_s": BRIEF_S}
    first, second = (learner(connect(target, f"w{n}"), **options) for n in (0, 1))
    weights, others = first.init(filled(0)), second.init(filled(0))
    together([lambda: loop(first, weights, 1.0, 2), lambda: loop(second, others, 1.0, 2)])
    move(weights, 1.0)
    with pytest.raises(shardwell.WorkersMissingError, match=r"net\.fragment-0.*w1") as caught:
        first.after_step(weights)
    assert caught.value.missing_worker_ids == ("w1",)
    assert first.waited_s > 0.0
    both = together([lambda: first.take(0, weights), lambda: loop(second, others, 3.0, 1)])
    weights.update(both[0])
    assert value(weights, 0) == value(others, 0)
    assert versions(first) == versions(second) == [2, 1]


def test_a_call_that_ended_unawaited_is_made_again(cluster, connect) -> None:
    """With overlap, time that went by before the take is not that of a wait."""
    target = cluster(2).target
    options = {"worker_count": 2, "fragments": 1, "sync_every": 4, "overlap": 3}
    first = learner(connect(target, "w0"), timeout_s=0.2, **options)
    second = learner(connect(target, "w1"), **options)
    weights, others = first.init(filled(0)), second.init(filled(0))
    loop(first, weights, 1.0, 1)
    eventually("the call has ended", lambda: offer_of(first).state == "failed")
    loop(first, weights, 1.0, 2)
    loop(second, others, 1.0, 1)
    first._timeout_s = 60.0
    loop(first, weights, 1.0, 1)
    assert versions(first) == [1]
    second.close()


def test_with_later_an_error_is_raised_once_and_the_offer_goes_again(cluster, connect) -> None:
    target = cluster(2).target
    options = {"worker_count": 2, "fragments": 1, "sync_every": 100, "overdue": "later"}
    first = learner(connect(target, "w0"), timeout_s=0.2, **options)
    second = learner(connect(target, "w1"), **options)
    weights, others = first.init(filled(0)), second.init(filled(0))
    first._position = second._position = 99
    loop(first, weights, 1.0, 1)
    eventually("the call has ended", lambda: offer_of(first).state == "failed")
    first._timeout_s = 60.0
    with pytest.raises(shardwell.WorkersMissingError, match=r"net\.fragment-0"):
        loop(first, weights, 1.0, 1)
    loop(first, weights, 1.0, 1)
    loop(second, others, 3.0, 1)
    eventually("the result is here", lambda: offer_of(first).state == "come")
    loop(first, weights, 1.0, 1)
    assert value(first.image(), 0) == 2.0


def test_ctrl_c_ends_a_wait_and_the_offer_is_taken_later(cluster, connect) -> None:
    target = cluster(2).target
    first, second = (learner(connect(target, f"w{n}"), worker_count=2) for n in (0, 1))
    weights, others = first.init(filled(0)), second.init(filled(0))
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        eventually("it waits", lambda: first.fragments[0].is_offered)
        threading.Event().wait(0.2)
        signal.pthread_kill(main, signal.SIGINT)

    done = in_background(interrupt)
    move(weights, 2.0)
    with pytest.raises(KeyboardInterrupt):
        first.after_step(weights)
    done.result(40)
    both = together([lambda: first.take(0, weights), lambda: loop(second, others, 4.0, 1)])
    weights.update(both[0])
    assert value(weights, 0) == value(others, 0) == 3.0


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_ctrl_c_at_any_moment_loses_nothing_that_was_moved(cluster, connect, alpha: float) -> None:
    """One learner, whose weights are always where it has moved them."""
    outer = learner(connect(cluster(1), "w0"), fragments=1, sync_every=1, alpha=alpha)
    weights = outer.init(filled(0))
    at, moved, places = 0, 0.0, set()
    while True:
        move(weights, 1.0)
        moved += 1.0
        interrupt = Interrupt(("outer/outer.py", "outer/fragment.py", "outer/schedule.py"), at)
        is_over = not interrupt.run(lambda: weights.update(outer.after_step(weights)))
        weights.update(outer.after_step(weights))
        assert {value(weights, layer) for layer in range(4)} == {moved}, interrupt.place
        assert {value(outer.image(), layer) for layer in range(4)} == {moved}, interrupt.place
        if is_over:
            break
        places.add(interrupt.place)
        at += 1
    assert {"outer.py:after_step", "outer.py:_take", "outer.py:_offer"} <= places


def test_closing_with_an_open_offer_ends_soon(cluster, connect) -> None:
    target = cluster(2).target
    client = connect(target, "w0")
    with learner(client, worker_count=2, overlap=0) as outer:
        weights = outer.init(filled(0))
        outer.offer(0, weights)
    with pytest.raises(shardwell.ClosedError):
        outer.take(0, weights)
    with pytest.raises(shardwell.ClosedError):
        outer.after_step(weights)


# Errors by name.


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 6}, r"sync_every=6 must be a multiple of the 4 fragments"),
        ({"overlap": 1}, r"overlap=1 must be below the interval of 1 inner steps"),
        ({"alpha": 1.5}, r"alpha must be from 0 to 1"),
        ({"alpha": -0.1}, r"alpha must be a finite number"),
        ({"alpha": float("nan")}, r"alpha must be a finite number"),
        ({"codec": "bf16"}, r"codec='bf16' rounds weights to 8 bits"),
        ({"codec": "bf16+lz4"}, r"codec='bf16\+lz4' rounds weights"),
        ({"codec": "int5"}, r"codec must be one of"),
        ({"overdue": "never"}, r"overdue must be 'wait' or 'later'"),
        ({"outer": shardwell.Average()}, r"outer must be an update rule"),
        ({"outer": 0.7}, r"outer must be an update rule"),
        ({"fragments": 5}, r"the tensors are of 4 layers"),
        ({"assignment": "random"}, r"assignment must be one of"),
        ({"timeout_s": -1}, r"timeout_s"),
    ],
)
def test_options_are_refused_by_name(cluster, connect, options: dict, text: str) -> None:
    client = connect(cluster(1), "w0")
    with pytest.raises(shardwell.ArgumentError, match=text):
        learner(client, **options)
    assert client.status()[0].parameters == ()  # before anything was sent


def test_weights_are_refused_by_tensor(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    outer = learner(client)
    good = filled(0)
    name = "layers.0.w"
    for wrong, text in (
        ([1, 2], r"must map the names of its 4 tensors"),
        ({k: v for k, v in good.items() if k != name}, r"lack tensor 'layers\.0\.w' of fragment 0"),
        ({**good, "layers.9.w": good[name]}, r"have 'layers\.9\.w', which is no tensor of it; did"),
        ({**good, name: np.zeros((4, 3), np.float32)}, r"must have shape \(3, 4\).*got \(4, 3\)"),
        ({**good, name: np.zeros((3, 4), np.int32)}, r"tensor 'layers\.0\.w' must be float32"),
    ):
        with pytest.raises(shardwell.ArgumentError, match=text):
            outer.init(wrong)
    with pytest.raises(shardwell.NonFiniteError, match=r"tensor 'layers\.0\.w' has values"):
        outer.init({**good, name: np.full((3, 4), np.nan, np.float32)})
    weights = outer.init(good)
    sent = client.traffic.sent_bytes
    for wrong, text in (
        ({k: v for k, v in good.items() if k != name}, r"lack tensor 'layers\.0\.w' of fragment 0"),
        ({**good, name: np.zeros(12, np.float32)}, r"must have shape \(3, 4\).*got \(12,\)"),
        ({**good, "more": good[name]}, r"have 'more', which is no tensor"),
        (
            {**good, name: np.array([[np.inf] * 4, [3.0] * 4, [0.0] * 4], np.float32)},
            r"fragment 0 of 'net'.*'layers\.0\.w'.*not finite in 4 of 12.*norm 6;.*reload\(\)",
        ),
    ):
        outer._position = 0
        with pytest.raises(shardwell.ArgumentError, match=text):
            outer.after_step(wrong)
    with pytest.raises(shardwell.ArgumentError, match=r"sample_count must be an integer from 0"):
        outer.after_step(weights, sample_count=-1)
    outer._position = 0
    with pytest.raises(shardwell.ArgumentError, match=r"larger unit, such as sequences"):
        outer.after_step(weights, sample_count=2**25)
    assert client.traffic.sent_bytes == sent


def test_another_family_under_the_name_is_refused(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    learner(client).init(filled(0))
    with pytest.raises(shardwell.SpecMismatchError, match=r"net\.fragment-0"):
        learner(client, fragments=2)
    for options, text in (
        (
            {"assignment": "balanced"},
            r"fragment\.assignment: 'strided' exists, 'balanced' was asked",
        ),
        (
            {"fragments": ["0", "1", "2", "3"]},
            r"fragment\.assignment: 'strided' exists, 'patterns:",
        ),
        ({"fragments": 1}, r"tensor 'layers\.1\.w'|fragment\."),
    ):
        with pytest.raises(shardwell.SpecMismatchError, match=text):
            learner(client, **options)
    with pytest.raises(shardwell.SpecMismatchError, match=r"codec: 'fp32' exists, 'fp16' was"):
        learner(client, codec="fp16")
    with pytest.raises(shardwell.SpecMismatchError, match=r"optimizer"):
        learner(client, outer=shardwell.SGD(0.5))


def test_a_refused_offer_raises_and_reload_goes_on(cluster, connect) -> None:
    """A finite difference whose square is not."""
    outer = learner(connect(cluster(2), "w0"), outer=shardwell.Adagrad(0.5))
    weights = outer.init(filled(0))
    with pytest.raises(shardwell.NonFiniteError, match=r"'sum' of.*lower the.*from reload\(\)"):
        loop(outer, weights, 1e30, 1)
    weights = outer.reload()
    assert {value(weights, layer) for layer in range(4)} == {0.0}
    assert steps(outer) == [1, 0, 0, 0]
    loop(outer, weights, 1.0, 8)
    assert max(steps(outer)) == 3


def test_diverged_weights_raise(cluster, connect) -> None:
    outer = learner(connect(cluster(2), "w0"), outer=shardwell.SGD(3e38), fragments=1)
    weights = outer.init(filled(0))
    with pytest.raises(shardwell.DivergedError):
        loop(outer, weights, 100.0, 4)
