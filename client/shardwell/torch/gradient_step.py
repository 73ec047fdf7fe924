"""One worker's step of a model's gradients, from the first that backward makes to new weights.

    state      the step's gradients                     leaves it by
    idle       none is announced                        announce -> announced; make -> counted
    announced  some are in the flat buffer, from where  take back, forget -> idle; a whole chunk
               they may leave while backward goes on    -> leaving; make -> counted
    leaving    some are on their way, or counted        make, skip -> counted; forget -> owed
    owed       a call failed: some may be counted       settle, with the same values -> counted
    counted    all are counted, the weights are taken   the next backward pass, as idle

Invariants:
  - A tensor is announced once a step.
  - A gradient that changes after some of the step may have left is an error, not a surprise. If
    none has left, all announcements are taken back, and `make` copies everything.
  - Of an owed step there is a copy, which no program writes to, before `make` raises.
  - Gradients that are counted count in no later step.

With overlap="auto" nothing is announced in the first step, which is watched (`GradientWatch`) and
decides about the others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from shardwell.errors import ArgumentError, NonFiniteError, ShardwellError
from shardwell.parameter.dealing import Batch
from shardwell.parameter.open_exchange import OpenExchange
from shardwell.parameter.parameter import Parameter
from shardwell.parameter.values import NamedArrays
from shardwell.torch.buffers import DeviceCopies, ModelBuffers, sparse
from shardwell.torch.gradient_watch import BackwardWatch, GradientWatch
from shardwell.torch.trained_model import TrainedModel, scale_back

if TYPE_CHECKING:
    from shardwell.torch.optimizer import ServerOptimizer

_LOG = logging.getLogger("shardwell")
_Seen: TypeAlias = list[tuple[weakref.ref[torch.Tensor] | None, int]]
"""Gradients at a moment, and how often each had been written by then."""


class GradientStep:
    """The step of a `ServerOptimizer` that comes next, by the table above.

    Backward has a thread for each device, which call `add`; all else is for one thread.
    """

    def __init__(
        self,
        parameter: Parameter[NamedArrays],
        model: TrainedModel,
        buffers: ModelBuffers,
        overlap: bool | Literal["auto"],
        settings: ServerOptimizer,
        rate: Callable[[], float],
    ) -> None:
        self.parameter = parameter
        self.model = model
        self.is_paused = False
        self.copies = DeviceCopies()
        self.begun: OpenExchange[NamedArrays] | None = None
        self._buffers = buffers
        self._tensors = list(model.tensors.values())
        self._places = {id(tensor): place for place, tensor in enumerate(self._tensors)}
        self._settings = settings
        self._rate = rate
        self._agreed: dict[str, Any] = {}
        self._is_auto = overlap == "auto"
        self.overlaps = overlap is True
        self._watch = GradientWatch() if self._is_auto else None
        self.backward = BackwardWatch()
        self._has_run_backward = False
        self._is_late = False
        """True if this step's gradients were found to change, so `make` copies all of them."""
        self._announced: dict[int, tuple[torch.Tensor, int]] = {}
        """By place: the gradient, and its version by torch's count."""
        self._owed: Callable[[], object] | None = None
        """Ends the step that failed, with the same values."""
        self._failed: _Seen = []
        self._counted: _Seen = []
        self._scaled_back: _Seen = []
        self._lock = threading.Lock()

    @property
    def state(self) -> Literal["idle", "announced", "leaving", "owed", "counted"]:
        """The state by the table above."""
        if self._owed is not None:
            return "owed"
        if self.begun is not None:
            return "leaving" if self._has_left else "announced"
        return "counted" if self._counted and not self._has_run_backward else "idle"

    @property
    def _has_left(self) -> bool:
        return self.begun is not None and self.begun.has_left

    # Announcing, in backward.

    def add(self, tensor: torch.Tensor) -> None:
        """Takes a gradient that backward has computed; its hook, on any of torch's threads."""
        self._has_run_backward = True
        self.backward.note(tensor)
        if self.is_paused or self._owed is not None:  # which `make` settles first
            return
        with torch.no_grad(), self._lock:
            if self.overlaps and not self._is_late:
                self._announce(tensor)
            elif self._watch is not None:
                self._watch.add(self._places[id(tensor)], tensor.grad, self._exchange_options)

    def _announce(self, tensor: torch.Tensor) -> None:
        place = self._places[id(tensor)]
        buffers = self._buffers
        where, view = buffers.layout.tensors[place], buffers.gradients.views[place]
        if place in self._announced:
            if self._take_back(f"gradients accumulate, such as of tensor {where.name!r},"):
                return
            raise ArgumentError(
                f"tensor {where.name!r} has a second gradient in one step, and the first has left; "
                "accumulate under optimizer.no_sync(), or pass overlap=False"
            )
        assert tensor.grad is not None
        begun, gradient = self._begin(), tensor.grad.detach()
        if gradient.layout != torch.strided:
            raise sparse(where.name)
        if self.copies.takes(gradient):
            self.copies.copy(view, gradient, partial(begun.ready, where.offset, where.stop))
        else:
            view.copy_(gradient)
            begun.ready(where.offset, where.stop)
        self._announced[place] = (tensor.grad, tensor.grad._version)

    def _begin(self) -> OpenExchange[NamedArrays]:
        if self.begun is None:
            self._check_model()
            options = self._exchange_options()
            self._buffers.await_uploads()
            self.begun, self._agreed = self.parameter.begin_exchange(**options), options
        return self.begun

    def _exchange_options(self) -> dict[str, Any]:
        options = {
            "gradient": self._buffers.gradients.arrays,
            "sample_count": self._settings.sample_count,
            "learning_rate": self._rate(),
            "batch": self.backward.batches,
            "out": self._buffers.weights.arrays,
            "timeout_s": self._settings.timeout_s,
        }
        is_added = self.begun is not None and options["batch"] != self._agreed["batch"]
        if is_added and not self._take_back("a batch is added"):
            options["batch"] = self._agreed["batch"]  # the others are the next step's
        for what in ("sample_count", "learning_rate"):
            if self.begun is not None and options[what] != self._agreed[what]:
                if self._take_back(f"{what} changes"):
                    break
                raise ArgumentError(
                    f"{what} was {self._agreed[what]} when gradients began to leave, and is "
                    f"{options[what]} now; set it before backward, or pass overlap=False"
                )
        return options

    def _take_back(self, change: str) -> bool:
        if not self._has_left:
            self.copies.wait()  # which write to where `forget` writes, and may announce
        if self._has_left:
            return False
        begun = self._reset()
        if begun is not None:
            begun.forget()
        self._is_late = True
        self._go_on_without_overlap(change)
        return True

    def _reset(self) -> OpenExchange[NamedArrays] | None:
        begun, self.begun = self.begun, None
        self._announced.clear()
        self._is_late = False
        return begun

    def _go_on_without_overlap(self, change: str) -> None:
        if self._is_auto:
            self.overlaps = False
            _LOG.debug(
                "parameter %r: %s between backward and step, so gradients leave in step(), not "
                "while backward goes on; overlap=False does so from the start, and clip_norm= of "
                "the update rule clips on the shards",
                self.parameter.name,
                change,
            )

    # Ending.

    def make(self, found_inf: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        """Ends the step: its gradients are counted, and the model gets the weights.

        Both arguments are a GradScaler's: gradients are divided by `scale`; a `found_inf` above 0
        skips the step.
        """
        if self._owed is not None:
            failed = self._failed
            self.settle()
            if self._are_now(failed):
                return  # it was this step that failed
        if found_inf is not None and float(found_inf) > 0:
            self.skip()
            return
        if scale is not None and not self._are_now(self._scaled_back):
            scale_back(self._tensors, scale)
            self._scaled_back = self._seen()
        if self.begun is None:
            self._check_model()
            if not self._has_new_gradients():
                return
        self._end_watch()
        self._check_announced()
        options = self._exchange_options()
        self.copies.wait()
        lying = self._buffers.copy_gradients(self._announced, may_lie=self.begun is None)
        self._end(self._reset(), options, lying)

    def skip(self) -> None:
        """Ends the step without a gradient; what has left counts."""
        self.settle()
        begun = self._forget()
        if begun is not None and begun.has_left:
            _LOG.warning(
                "parameter %r: step %d is skipped, and a part of its gradients had left, which "
                "counts; overlap=False keeps all of them until step()",
                self.parameter.name,
                self.parameter.next_step,
            )
            self._end(begun, self._agreed)
        elif self.parameter.spec.mode == "sync":
            self._end(None, {**self._exchange_options(), "gradient": None})

    def forget(self, *, are_zeros: bool) -> None:
        """Takes note that the gradients are gone, or zeros."""
        begun = self._forget()
        has_left = begun is not None and begun.has_left
        self._note_counted(
            [] if not are_zeros else self._seen(), self._agreed["batch"] if has_left else ()
        )
        self.backward.give_back()
        if begun is not None and has_left:
            self._owe(self._ending(begun, {}), [])
            raise ArgumentError(
                "zero_grad() after a backward pass without a step: a part of its gradients has "
                "left and counts; compute what is for no step under optimizer.no_sync(), or "
                "pass overlap=False"
            )

    def _forget(self) -> OpenExchange[NamedArrays] | None:
        self.copies.wait()  # which write to where `forget` writes
        begun = self._reset()
        if self._watch is not None:
            self._watch.begin_anew()  # this step shows nothing
        if begun is not None:
            begun.forget()
        return begun

    def settle(self) -> None:
        """Makes good for a step that failed, if one did."""
        if self._owed is not None:
            step, owed = self.parameter.next_step, self._owed
            try:
                owed()
            finally:
                if self.parameter.next_step != step:
                    self._owe(None, [])
            self._buffers.put_weights()

    def restart(self, parameter: Parameter[NamedArrays]) -> None:
        """Goes on with another parameter in place of the former."""
        self.parameter = parameter
        self._failed, self._agreed = [], {}
        if self.backward.loader is not None:
            self.backward.loader.begin_anew()
        self._reset()

    def close(self) -> None:
        """Takes the hooks off the model."""
        self.model.close()
        self.copies.close()

    def check_between(self, what: str) -> None:
        """Refuses a call while a gradient has left that no step has counted."""
        if self.state in ("owed", "leaving"):
            raise ArgumentError(f"{what} in the middle of a step; call step() before")

    def _end(
        self,
        begun: OpenExchange[NamedArrays] | None,
        options: Mapping[str, Any],
        lying: NamedArrays | None = None,
    ) -> None:
        step, taken, batches = self.parameter.next_step, self._seen(), options["batch"]
        again = self._ending(begun, options)
        end = again
        if lying:
            end = self._ending(begun, {**options, "gradient": {**options["gradient"], **lying}})
        try:
            end()
        except (NonFiniteError, ArgumentError):  # nothing more has left
            if begun is not None and begun.has_left:
                self._note_counted(taken, batches)
                begun.forget()
                self._owe(again, [])
                with contextlib.suppress(ShardwellError):  # which the next `step` raises
                    self.settle()
            raise
        except BaseException:
            if self.parameter.next_step == step:  # else it diverged, and is over
                for tensor_name, array in (lying or {}).items():  # which others may write to now
                    np.copyto(options["gradient"][tensor_name], array)
                self._owe(again, taken)
            self._note_counted(taken, batches)
            raise
        self._note_counted(taken, batches)
        self._buffers.put_weights()

    def _ending(
        self, begun: OpenExchange[NamedArrays] | None, options: Mapping[str, Any]
    ) -> Callable[[], object]:
        def end() -> object:
            self._buffers.await_uploads()
            timeout_s = self._settings.timeout_s
            if begun is not None:
                return begun.finish(timeout_s)
            return self.parameter.exchange(**{**options, "timeout_s": timeout_s})

        return end

    def _owe(self, end: Callable[[], object] | None, gradients: _Seen) -> None:
        self._owed, self._failed = end, gradients

    # Which gradients are new.

    def _seen(self) -> _Seen:
        grads = [tensor.grad for tensor in self._tensors]
        return [(None, -1) if g is None else (weakref.ref(g), g._version) for g in grads]

    def _are_now(self, seen: _Seen, *, but_none: bool = False) -> bool:
        grads = [tensor.grad for tensor in self._tensors]
        return bool(seen) and all(
            (but_none or known is None)
            if grad is None
            else known is not None and version == grad._version and known() is grad
            for grad, (known, version) in zip(grads, seen, strict=True)
        )

    def _note_counted(self, gradients: _Seen, batches: Sequence[Batch]) -> None:
        self._scaled_back, self._counted, self._has_run_backward = [], gradients, False
        self.backward.note_given(batches)

    def _has_new_gradients(self) -> bool:
        if self._settings.sample_count == 0:
            return True
        if all(tensor.grad is None for tensor in self._tensors):
            return False
        if not self._has_run_backward and self._are_now(self._counted, but_none=True):
            raise ArgumentError(
                "step() without a backward pass since the last one, which has counted these "
                "gradients already; call step() once after each backward pass, or set "
                "sample_count = 0 if this worker has no batch for the step"
            )
        return True

    # Checks.

    def _end_watch(self) -> None:
        if self._watch is None or self._watch.is_empty:
            return
        change = self._watch.change([t.grad for t in self._tensors], self._exchange_options())
        self._watch = None
        if change is None:
            self.overlaps = True
        else:
            self._go_on_without_overlap(change)

    def _check_announced(self) -> None:
        for place, (gradient, version) in self._announced.items():
            if self._tensors[place].grad is not gradient or gradient._version != version:
                name = self._buffers.layout.tensors[place].name
                if self._take_back(f"the gradient of tensor {name!r} changes"):
                    return
                raise ArgumentError(
                    f"gradient of tensor {name!r} was changed after backward, when it had left "
                    "already; clip with clip_norm= of the optimizer, or pass overlap=False"
                )

    def _check_model(self) -> None:
        self.model.check()
        others = self._buffers.other_weights()
        if others:
            name = next(name for name in self.model.named() if name in others)
            raise ArgumentError(
                f"the weights of tensor {name!r} were changed by something else than step(), and "
                f"the shards, at step {self.parameter.next_step}, do not have them; to begin a new "
                "training with them call push_weights() on all workers; close() this "
                "ServerOptimizer before another is made for the model"
            )
        self._buffers.follow_device()
