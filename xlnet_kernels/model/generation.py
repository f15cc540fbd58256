"""Generation with a language model: continuing prompts, and filling in missing tokens in any order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .._checks import as_python, shortened
from ..masks import HIGHEST, RankMask
from .config import XLNetConfig
from .decoding import Decoder, flagged_positions, right_pad
from .inputs import check_tensor
from .sampling import Sampler


class Generation(nn.Module):
    """Mixin with `generate` and `fill` of `XLNetLMHeadModel`, both without dropout and gradients."""

    config: XLNetConfig

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Tensor | Sequence[Sequence[int]] | Sequence[Tensor],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stream: str | None = None,
        causal_prompt: bool = False,
        do_sample: bool | None = None,
        watch: Callable[[list[Tensor]], Sequence[bool] | None] | None = None,
    ) -> Tensor | list[Tensor]:
        """Continue each prompt, token by token; keys and values of earlier tokens are cached.

        Args:
            prompt_ids: prompts of any lengths: a list of lists or of 1-dimensional tensors, or (B, L) integers.
            max_new_tokens: at least 1.
            temperature, top_k, top_p: see `Sampler`; temperature 0 is greedy.
            seed: same seed, same text; prompt i draws from seed + i, independently of the other prompts.
            lengths: (B,), with (B, L) prompt_ids: the number of valid first tokens of each row.
            eos_token_id: stops a text when it appears, one or several; default config.eos_token_id, () for none.
            stream: the stream that predicts a token: "query" at its position (permutation LM), or "content" one
                position earlier (auto-regressive LM). Default "query", with attn_type="uni" "content".
            causal_prompt: whether a prompt's tokens see only earlier tokens, as always with the "content" stream and
                with attn_type="uni". Otherwise all see each other, like context in pre-training.
            do_sample: False is greedy for any temperature; True draws; None draws for a temperature above 0.
            watch: called after each token with the texts so far, prompts included. It may return a bool for each text,
                True to end it (stop words), or None.

        Returns:
            Prompts with their continuations: a list of 1-dimensional tensors, or for (B, L) prompts one tensor, with
            config.pad_token_id after texts that ended early.

        Raises:
            ValueError: an argument is impossible; the text names it.

        >>> from xlnet_kernels import XLNetConfig, XLNetLMHeadModel
        >>> lm = XLNetLMHeadModel(XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64))
        >>> [len(text) for text in lm.generate([[7, 8, 9], [10]], 4, seed=1, eos_token_id=())]
        [7, 5]
        """
        config, device = self.config, _device_of(self, prompt_ids)
        prompts = _read_prompts(prompt_ids, lengths, config.vocab_size, device)
        max_new_tokens, causal_prompt = map(as_python, (max_new_tokens, causal_prompt))
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be an integer of at least 1, got {shortened(max_new_tokens)}")
        if stream not in (None, "query", "content"):
            raise ValueError(f'stream must be "query", "content" or None, got {shortened(stream)}')
        if not isinstance(causal_prompt, bool):
            raise ValueError(f"causal_prompt must be a bool, got {shortened(causal_prompt)}")
        if do_sample not in (None, True, False) or (do_sample and temperature == 0):
            raise ValueError(
                f"do_sample must be True (temperature above 0), False or None, got {shortened(do_sample)} and "
                f"{shortened(temperature)}"
            )
        stop = _stop_tokens(eos_token_id, config, device)
        batch = len(prompts)
        sampler = Sampler(batch, 0 if do_sample is False else temperature, top_k, top_p, seed)

        by_query = (stream or ("content" if config.attn_type == "uni" else "query")) == "query"
        causal = causal_prompt or not by_query or config.attn_type == "uni"
        end = torch.tensor([len(prompt) for prompt in prompts], device=device)[:, None]
        ids = right_pad(prompts, int(end.max()) + max_new_tokens, _padding_id(config))
        position = torch.arange(ids.shape[1], device=device).expand(batch, -1)
        known = position < end
        if causal:
            window = config.mem_len + 1 if config.same_length and config.attn_type == "uni" and config.mem_len else None
            mask = RankMask.causal(batch, ids.shape[1], window=window, device=device)
        else:
            mask = RankMask.from_order(position, targets=~known)

        places, valid = flagged_positions(known)
        running = torch.ones_like(end, dtype=torch.bool)
        with _without_dropout(self):
            decoder = Decoder(self, mask, ahead=not causal)
            for _ in range(max_new_tokens):
                targets = end if by_query else end[:, :0]
                # The target's row is the last; without a target, the last token's row.
                row = torch.full_like(end, places.shape[1]) if by_query else valid.sum(1, keepdim=True) - 1
                logits = decoder(ids.gather(1, places), places, valid, targets, row.clamp(min=0))
                token = sampler(logits, [1] * batch)
                ids.scatter_(1, end, torch.where(running, token, ids.gather(1, end)))
                places, valid = end, running
                end = end + running
                running = running & ~torch.isin(token, stop)
                if watch is not None:
                    ended = watch(_texts(ids, end))
                    if ended is not None:
                        running = running & ~torch.tensor(list(ended), device=device)[:, None]
                if not running.any():
                    break
        return ids[:, : int(end.max())] if isinstance(prompt_ids, Tensor) else _texts(ids, end)

    @torch.no_grad()
    def fill(
        self,
        input_ids: Tensor,
        missing: Tensor,
        order: str | Tensor = "left-to-right",
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        *,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        watch: Callable[[Tensor, Tensor], object] | None = None,
    ) -> Tensor:
        """Fill in the missing tokens, each given the known tokens and those already filled in.

        The query stream predicts every token, and its content stream is entered once. This is the permutation LM with
        this factorisation order (Yang et al. 2019, section 2.2). Memory is linear in L.

        Args:
            input_ids: (B, L) integers, ignored at missing positions.
            missing: (B, L) bool, True where a token is missing.
            order: "left-to-right", "random", or "confident": always the position with the likeliest best token. Or (B,
                L) integers: lower numbers first, equal numbers in one step, independently of each other.
            temperature, top_k, top_p, seed: as in `generate`.
            attention_mask: (B, L), 1 or True = token. token_type_ids: (B, L) integers, segments.
            watch: called after each step with the tokens and the still missing positions, both (B, L).

        Returns:
            (B, L) integers.

        Raises:
            ValueError: an argument is impossible; the text names it.

        >>> from xlnet_kernels import XLNetConfig, XLNetLMHeadModel
        >>> lm = XLNetLMHeadModel(XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64))
        >>> ids = torch.tensor([[7, 0, 9, 0, 11]])
        >>> lm.fill(ids, missing=ids == 0, order="confident", temperature=0)[0, ::2].tolist()
        [7, 9, 11]
        """
        like = torch.empty(0, device=_device_of(self, input_ids))
        check_tensor("input_ids", input_ids, ("batch", "length"), like, integers=True)
        shape = tuple(input_ids.shape)
        check_tensor("missing", missing, shape, like)
        if missing.dtype != torch.bool:
            raise ValueError(f"missing must be bool (True = fill in), got {missing.dtype}")
        padding = torch.zeros_like(missing)
        if attention_mask is not None:
            check_tensor("attention_mask", attention_mask, shape, like)
            padding = ~(attention_mask > 0)
            if (padding & missing).any():
                raise ValueError("missing must be False where attention_mask says that there is no token")
        if token_type_ids is not None:
            check_tensor("token_type_ids", token_type_ids, shape, like, integers=True)
            token_type_ids = token_type_ids.long()
        filled = input_ids.long().masked_fill(missing, 0)
        _check_ids("input_ids", filled, self.config.vocab_size)
        sampler = Sampler(shape[0], temperature, top_k, top_p, seed)
        step_of = _steps(order, missing, sampler)

        # Missing positions have the highest rank: no row sees them, and they see all known tokens.
        late = torch.full_like(filled, HIGHEST)
        mask = RankMask.from_order(late, missing, padding)
        places, valid = flagged_positions(~missing & ~padding)
        left = missing.clone()
        with _without_dropout(self):
            decoder = Decoder(self, mask, token_type_ids)
            for step in range(_count_steps(step_of, missing)):
                candidates, possible = flagged_positions(left if step_of is None else left & (step_of == step))
                first, count = places.shape[1], candidates.shape[1]
                rows = torch.arange(first, first + count, device=filled.device).expand(shape[0], -1)
                logits = decoder(filled.gather(1, places), places, valid, candidates, rows)
                if step_of is None:
                    candidates, possible, logits = _most_confident(candidates, possible, logits)
                places, valid = candidates, possible
                tokens = sampler(logits, valid.sum(1).tolist())
                sequence, row = valid.nonzero(as_tuple=True)
                place = places[sequence, row]
                filled[sequence, place] = tokens[sequence, row]
                mask.query_rank[sequence, place] = mask.key_rank[sequence, place] = step
                left[sequence, place] = False
                if watch is not None:
                    watch(filled.clone(), left.clone())
        return torch.where(missing, filled, input_ids.long())


def _device_of(model: nn.Module, given: object) -> torch.device:
    """Device of the model's parameters, or of the input if the parameters are on the meta device."""
    device = next(model.parameters()).device
    if device.type == "meta":
        device = given.device if isinstance(given, Tensor) else torch.device("cpu")
    return device


def _texts(ids: Tensor, end: Tensor) -> list[Tensor]:
    """The first end (B, 1) tokens of each row of ids (B, K)."""
    return [row[:count] for row, count in zip(ids, end[:, 0].tolist(), strict=True)]


def _most_confident(positions: Tensor, valid: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Position, validity and logits (N = 1) of the position (of (B, N)) in each row with the likeliest best token."""
    confidence = logits.float().log_softmax(-1).amax(-1).masked_fill(~valid, -torch.inf)
    best = confidence.argmax(1, keepdim=True)
    chosen = logits.gather(1, best[:, :, None].expand(-1, -1, logits.shape[-1]))
    return positions.gather(1, best), valid.any(1, keepdim=True), chosen


def _steps(order: str | Tensor, missing: Tensor, sampler: Sampler) -> Tensor | None:
    """Step (B, L) at which each missing position is filled in, or None for the order "confident"."""
    if isinstance(order, Tensor):
        check_tensor("order", order, tuple(missing.shape), missing, integers=True)
        order = order.long()
    elif order == "left-to-right":
        order = missing.cumsum(1)
    elif order == "random":
        order = missing.long()
        for row, generator in enumerate(sampler.generators):
            shuffled = torch.randperm(int(missing[row].sum()), generator=generator, device="cpu")
            order[row, missing[row]] = shuffled.to(missing.device)
    elif order == "confident":
        return None
    else:
        raise ValueError(
            f'order must be "left-to-right", "random", "confident" or integers {tuple(missing.shape)}, got '
            f"{shortened(order)}"
        )
    # Ranks without gaps: the number of different lower values among the row's missing positions.
    value, index = order.masked_fill(~missing, torch.iinfo(torch.int64).max).sort(1)
    new = torch.zeros_like(value)
    new[:, 1:] = value[:, 1:] != value[:, :-1]
    return torch.zeros_like(value).scatter(1, index, new.cumsum(1))


def _count_steps(step_of: Tensor | None, missing: Tensor) -> int:
    if not missing.any():
        return 0
    return int(missing.sum(1).max() if step_of is None else step_of[missing].max() + 1)


def _read_prompts(
    prompts: Tensor | Sequence, lengths: Tensor | Sequence[int] | None, vocab_size: int, device: torch.device
) -> list[Tensor]:
    """The prompts as 1-dimensional int64 tensors on `device`, without padding."""
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2:
            raise ValueError(f"prompt_ids must be a tensor (B, L) or a list of prompts, got {tuple(prompts.shape)}")
        rows = list(prompts)
        if lengths is not None:
            counts = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
            longest = prompts.shape[1]
            if len(counts) != len(rows) or not all(type(n) is int and 1 <= n <= longest for n in counts):
                raise ValueError(f"lengths must be {len(rows)} integers in [1, {longest}], got {counts}")
            rows = [row[:count] for row, count in zip(rows, counts, strict=True)]
    elif not isinstance(prompts, (list, tuple)):
        raise ValueError(f"prompt_ids must be a tensor (B, L) or a list of prompts, got {type(prompts).__name__}")
    elif lengths is not None:
        raise ValueError("lengths are for prompt_ids (B, L): prompts in a list have lengths of their own")
    else:
        rows = [_as_row(index, prompt) for index, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompt_ids must hold at least one prompt, got none")
    for index, row in enumerate(rows):
        if not row.numel():
            raise ValueError(f"prompt_ids must have at least one token in each prompt, got none in prompt {index}")
        if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
            raise ValueError(f"prompt_ids must hold integers, got {row.dtype} in prompt {index}")
        _check_ids(f"prompt_ids[{index}]", row, vocab_size)
    return [row.to(device, torch.int64) for row in rows]


def _as_row(index: int, prompt: Tensor | Sequence[int]) -> Tensor:
    try:
        row = prompt if isinstance(prompt, Tensor) else torch.tensor(list(prompt), device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"prompt_ids[{index}] must be a list of integers: {error}") from error
    if row.dim() != 1:
        raise ValueError(f"prompt_ids[{index}] must be 1-dimensional, got shape {tuple(row.shape)}")
    return row


def _check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    if ids.numel() and not (0 <= ids.min() and ids.max() < vocab_size):
        raise ValueError(f"{name} must lie in [0, {vocab_size}), got values from {ids.min()} to {ids.max()}")


def _stop_tokens(given: int | Sequence[int] | None, config: XLNetConfig, device: torch.device) -> Tensor:
    stop = as_python(config.eos_token_id if given is None else given)
    stop = [] if stop is None else [as_python(one) for one in stop] if isinstance(stop, Iterable) else [stop]
    if not all(type(token) is int and (given is None or 0 <= token < config.vocab_size) for token in stop):
        got = shortened(given)
        raise ValueError(f"eos_token_id must be one or several integers in [0, {config.vocab_size}), got {got}")
    return torch.tensor(stop, dtype=torch.int64, device=device)


def _padding_id(config: XLNetConfig) -> int:
    token = config.pad_token_id
    return token if token is not None and 0 <= token < config.vocab_size else 0


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
