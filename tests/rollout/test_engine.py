# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The engine against a plain loop over the dense decoder, and its promises."""

from __future__ import annotations

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import NonFinite, RequestError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import forward, init_params, logits
from jaxrl_llm.rollout.engine import Engine, EngineConfig, Request, SamplingParams
from jaxrl_llm.types import Prompt


def prompt(length: int, start: int = 1) -> Prompt:
    tokens = tuple((start + 7 * i + i * i) % 97 for i in range(length))
    return Prompt(id=f"p{length}-{start}", tokens=tokens, text="")


@functools.partial(jax.jit, static_argnames="config")
def _dense_logps(params, config, tokens):
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None, :]
    hidden = forward(params, config, tokens[None, :], positions, jnp.ones_like(positions))
    return jax.nn.log_softmax(logits(params, hidden, config)[0], axis=-1)


def dense_greedy(params, config, tokens, count):
    """Greedy continuation by running the whole sequence anew for every token (padded to 128)."""
    tokens, logps = list(tokens), []
    for _ in range(count):
        padded = np.zeros(128, np.int32)
        padded[: len(tokens)] = tokens
        row = np.asarray(_dense_logps(params, config, jnp.asarray(padded)))[len(tokens) - 1]
        tokens.append(int(row.argmax()))
        logps.append(row.max())
    return tokens[-count:], np.array(logps)


@pytest.mark.parametrize(
    ("page_size", "attention"), [(1, "view"), (4, "pages"), (16, "view"), (64, "pages")]
)
def test_greedy_equals_a_dense_loop(tiny_config, tiny_params, page_size, attention):
    """Prompts of one token, exactly one page, several pages, longer than a prefill chunk (48) and
    than a block of keys (64 with their completions)."""
    config = EngineConfig(
        max_prompt_tokens=64,
        max_new_tokens=64,
        slots=4,
        page_size=page_size,
        prefill_tokens=48,
        attention=attention,
    )
    engine = Engine(tiny_config, tiny_params, config)
    lengths = [1, 2, page_size, min(3 * page_size, 62), min(3 * page_size + 1, 63), 41, 64]
    requests = [
        Request(prompt(n), SamplingParams(max_tokens=12, temperature=0.0), n=2, uid=i)
        for i, n in enumerate(lengths)
    ]
    rollouts = list(engine.generate(requests))
    assert len(rollouts) == 2 * len(lengths)
    for rollout in rollouts:
        expected, logps = dense_greedy(tiny_params, tiny_config, rollout.prompt.tokens, 12)
        assert rollout.tokens.tolist() == expected
        np.testing.assert_allclose(rollout.logp_sampler, logps, atol=2e-5)
        assert rollout.finish_reason == "length" and rollout.mask.all()


@pytest.mark.parametrize("attention", ["view", "pages"])
def test_scarce_pages_preempt_and_change_no_token(tiny_config, tiny_params, attention):
    """Six groups on a pool that holds about two and a half of the eight samples that fit the
    slots: some lose their pages, what they drew stands, and all equal a dense loop."""
    sizes = dict(num_pages=26, decode_steps=4, attention=attention)
    engine = make_engine(tiny_config, tiny_params, **sizes)
    requests = [
        Request(prompt(3 + 5 * i, i), SamplingParams(max_tokens=30, temperature=0.0), n=2, uid=i)
        for i in range(6)
    ]
    rollouts = list(engine.generate(requests))
    assert len(rollouts) == 12 and engine.stats.preempted > 0
    assert engine.stats.peak_pages <= 25
    for rollout in rollouts:
        expected, logps = dense_greedy(tiny_params, tiny_config, rollout.prompt.tokens, 30)
        assert rollout.tokens.tolist() == expected
        np.testing.assert_allclose(rollout.logp_sampler, logps, atol=1e-4)
    drawn = [dataclasses.replace(r, params=SamplingParams(max_tokens=30, seed=5)) for r in requests]
    plenty = make_engine(tiny_config, tiny_params, attention=attention)
    tokens = lambda rollouts: {k: v[0] for k, v in by_sample(rollouts).items()}  # noqa: E731
    assert tokens(engine.generate(drawn)) == tokens(plenty.generate(drawn))


def test_rows_move_when_they_outgrow_the_view(tiny_config, tiny_params):
    """Completions past 128 tokens need a wider view: rows are written back and read again."""
    config = EngineConfig(max_prompt_tokens=64, max_new_tokens=128, slots=4, page_size=16)
    engine = Engine(tiny_config, tiny_params, config)
    requests = [
        Request(prompt(n), SamplingParams(max_tokens=new, temperature=0.0), uid=n)
        for n, new in ((60, 100), (10, 20), (33, 60))
    ]
    for rollout in engine.generate(requests):
        shorter = rollout.tokens[:60]
        expected, _ = dense_greedy(tiny_params, tiny_config, rollout.prompt.tokens, len(shorter))
        assert shorter.tolist() == expected
    paged = Engine(tiny_config, tiny_params, dataclasses.replace(config, attention="pages"))
    tokens = lambda engine: {k: v[0] for k, v in by_sample(engine.generate(requests)).items()}  # noqa: E731
    assert tokens(engine) == tokens(paged)


def make_engine(config, params, **sizes) -> Engine:
    defaults = dict(max_prompt_tokens=64, max_new_tokens=64, slots=8, page_size=4)
    return Engine(config, params, EngineConfig(**{**defaults, "prefill_tokens": 64, **sizes}))


def by_sample(rollouts) -> dict:
    return {(r.prompt.id, r.sample): (r.tokens.tolist(), r.logp_sampler.tolist()) for r in rollouts}


def mixed_requests(count: int = 10, seed: int = 0, new: int = 9) -> list[Request]:
    """Prompts of 1 to 46 tokens, groups of 1 to 3, several temperatures and top-p's."""
    return [
        Request(
            prompt(1 + 5 * i, start=i),
            SamplingParams(
                max_tokens=1 + (i * 4) % new,
                temperature=(1.0, 0.7, 0.0)[i % 3],
                top_p=(1.0, 0.8)[i % 2],
                seed=seed,
            ),
            n=1 + i % 3,
            uid=i,
        )
        for i in range(count)
    ]


def test_freed_slots_are_refilled(tiny_config, tiny_params):
    """Lengths 64, 4, 4, 4 three times on 4 slots: rounds would take 192 steps; 72 are enough."""
    engine = make_engine(tiny_config, tiny_params, slots=4)
    requests = [
        Request(prompt(5, i), SamplingParams(max_tokens=length), uid=i)
        for i, length in enumerate([64, 4, 4, 4] * 3)
    ]
    rollouts = list(engine.generate(requests))
    assert sorted(len(r.tokens) for r in rollouts) == [4] * 9 + [64] * 3
    assert engine.stats.decode_steps <= 76
    assert engine.stats.useful_tokens == 3 * 64 + 9 * 4
    assert [len(r.tokens) for r in rollouts[:9]] == [4] * 8 + [64]  # as they finish


def test_a_small_pool_is_used_again_and_again(tiny_config, tiny_params):
    """One group's worth of pages for six groups: the same tokens as with plenty."""
    requests = [
        Request(prompt(10, i), SamplingParams(max_tokens=6, seed=3), n=3, uid=i) for i in range(6)
    ]
    scarce = make_engine(tiny_config, tiny_params, num_pages=1 + 5)
    plenty = make_engine(tiny_config, tiny_params)
    expected = by_sample(plenty.generate(requests))
    assert by_sample(scarce.generate(requests)) == expected
    assert scarce.stats.peak_pages == 5 < plenty.stats.peak_pages
    assert scarce.stats.prefill_tokens == plenty.stats.prefill_tokens == 60  # once per group


def test_draws_depend_on_nothing_else_in_the_batch(tiny_config, tiny_params):
    """To the last bit: in another order, on other slots and pages, alone."""
    requests = mixed_requests()
    engine = make_engine(tiny_config, tiny_params)
    together = by_sample(engine.generate(requests))
    assert by_sample(engine.generate(reversed(requests))) == together
    for request in requests:
        for key, value in by_sample(engine.generate([request])).items():
            assert value == together[key]


def test_draws_do_not_depend_on_the_engines_sizes():
    """To the last bit, at the width of a real model (XLA's code for very small arrays differs from
    shape to shape): decode programs of 8 to 64 rows, other chunks and pages."""
    config = ModelConfig(
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=600,
        num_layers=1,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
    )
    params = jax.tree.map(
        lambda x: x * jnp.float32(5) if x.ndim > 1 else x, init_params(config, jax.random.key(1))
    )
    requests = mixed_requests(8)
    expected = by_sample(make_engine(config, params).generate(requests))
    for sizes in (dict(slots=64, prefill_tokens=32), dict(slots=16, page_size=16, decode_steps=3)):
        engine = make_engine(config, params, **sizes)
        assert by_sample(engine.generate(requests)) == expected


def test_the_seed_decides(tiny_config, tiny_params):
    engine = make_engine(tiny_config, tiny_params)
    draws = lambda seed: by_sample(  # noqa: E731
        engine.generate([Request(prompt(7), SamplingParams(max_tokens=8, seed=seed), n=3, uid=1)])
    )
    first, other, again = draws(0), draws(1), draws(0)
    assert first == again
    assert all(first[key][0] != other[key][0] for key in first)
    assert len({tuple(tokens) for tokens, _ in first.values()}) == 3  # siblings differ


def test_frequencies_of_first_tokens_match_the_model(tiny_config, tiny_params):
    """Over 1024 samples of one prompt; chi-square over the 6 likeliest tokens and the rest."""
    engine = make_engine(tiny_config, tiny_params)
    tokens = prompt(9)
    request = Request(tokens, SamplingParams(max_tokens=1, temperature=0.8, seed=11), n=1024)
    rollouts = list(engine.generate([request]))
    drawn = np.array([int(r.tokens[0]) for r in rollouts])
    padded = np.zeros(128, np.int32)
    padded[:9] = tokens.tokens
    logps = np.asarray(_dense_logps(tiny_params, tiny_config, jnp.asarray(padded)))[8] / 0.8
    logps = logps - np.logaddexp.reduce(logps)
    for r in rollouts[:20]:
        np.testing.assert_allclose(r.logp_sampler, logps[r.tokens], atol=2e-5)
    top = np.argsort(-logps)[:6]
    expected = 1024 * np.append(np.exp(logps[top]), 1 - np.exp(logps[top]).sum())
    counts = np.array([(drawn == t).sum() for t in top])
    counts = np.append(counts, 1024 - counts.sum())
    assert expected.min() >= 5
    assert ((counts - expected) ** 2 / expected).sum() < 22.5  # 0.1 % point, 6 degrees of freedom


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_stop_id_ends_a_completion(tiny_config, tiny_params, which):
    engine = make_engine(tiny_config, tiny_params)
    plain = Request(prompt(6), SamplingParams(max_tokens=20, seed=2), uid=4)
    (full,) = engine.generate([plain])
    tokens = full.tokens.tolist()
    stop = tokens[5]
    end = tokens.index(stop) + 1
    others = [t for t in range(97) if t not in tokens][:2]
    ids = tuple([*others[:which], stop, *others[which:]])
    stopped = Request(prompt(6), SamplingParams(max_tokens=20, seed=2, stop_ids=ids), uid=4)
    (rollout,) = engine.generate([stopped])
    assert rollout.finish_reason == "stop" and full.finish_reason == "length"
    assert rollout.tokens.tolist() == tokens[:end]  # the stop token is the last entry
    np.testing.assert_array_equal(rollout.logp_sampler, full.logp_sampler[:end])
    # chosen on the last allowed position it counts as "stop" as well
    exact = SamplingParams(max_tokens=end, seed=2, stop_ids=ids)
    (rollout,) = engine.generate([Request(prompt(6), exact, uid=4)])
    assert rollout.finish_reason == "stop" and len(rollout.tokens) == end


def letters(tokens) -> str:
    return "".join(chr(40 + token) for token in tokens)


@pytest.mark.parametrize("decode_steps", [3, 64])
def test_a_stop_string_ends_with_the_token_that_completes_it(
    tiny_config, tiny_params, decode_steps
):
    """Whatever the decode calls; the tokens, and so the draws, before it are the same."""
    config = EngineConfig(
        max_prompt_tokens=8, max_new_tokens=32, slots=4, page_size=4, decode_steps=decode_steps
    )
    engine = Engine(tiny_config, tiny_params, config, decode_text=letters)
    plain = Request(prompt(6), SamplingParams(max_tokens=30, seed=2), uid=4)
    (full,) = engine.generate([plain])
    text = letters(full.tokens)
    stop = text[11:13]
    end = text.index(stop) + 2
    params = SamplingParams(max_tokens=30, seed=2, stop_strings=("never", stop))
    other = Request(prompt(5), SamplingParams(max_tokens=20), uid=9)
    rollouts = {r.prompt.id: r for r in engine.generate([Request(prompt(6), params, uid=4), other])}
    stopped = rollouts[plain.prompt.id]
    assert stopped.tokens.tolist() == full.tokens[:end].tolist()
    assert stopped.finish_reason == "stop" and len(stopped.logp_sampler) == end
    assert len(rollouts[other.prompt.id].tokens) == 20
    with pytest.raises(RequestError, match="stop strings"):
        make_engine(tiny_config, tiny_params).generate([Request(prompt(6), params)])


def test_min_tokens_biases_and_bans(tiny_config, tiny_params):
    engine = make_engine(tiny_config, tiny_params)

    def tokens(**values) -> list[int]:
        params = SamplingParams(**{"max_tokens": 12, "seed": 2, **values})
        (rollout,) = engine.generate([Request(prompt(6), params, uid=4)])
        return rollout.tokens.tolist()

    plain = tokens()
    stop = plain[3]
    assert tokens(stop_ids=(stop,)) == plain[: plain.index(stop) + 1]
    longer = tokens(stop_ids=(stop,), min_tokens=8)
    assert len(longer) >= 8 and stop not in longer[:7]
    assert stop not in tokens(logit_bias=((stop, -float("inf")),))
    assert tokens(logit_bias=((5, 1e4),)) == [5] * 12
    assert tokens(top_k=1) == tokens(min_p=1.0) == tokens(temperature=0.0)


def test_int8_weights_are_near_and_bfloat16_nearer(tiny_config, tiny_params):
    requests = [Request(prompt(9, i), SamplingParams(max_tokens=1), uid=i) for i in range(8)]
    gaps = {}
    for weights in ("native", "bfloat16", "int8"):
        engine = make_engine(tiny_config, tiny_params, weights=weights)
        rollouts = list(engine.generate(requests))
        gap = []
        for rollout in rollouts:
            padded = np.zeros(128, np.int32)
            padded[:9] = rollout.prompt.tokens
            logps = np.asarray(_dense_logps(tiny_params, tiny_config, jnp.asarray(padded)))[8]
            gap.append(abs(logps[rollout.tokens[0]] - rollout.logp_sampler[0]))
        gaps[weights] = np.mean(gap)
    assert gaps["native"] < 2e-5 < gaps["bfloat16"] and 2e-5 < gaps["int8"] < 0.3
    assert gaps["bfloat16"] < 0.3


def test_requests_that_never_fit_are_refused_before_anything_runs(tiny_config, tiny_params):
    engine = make_engine(tiny_config, tiny_params, num_pages=20)
    good = Request(prompt(5), SamplingParams(max_tokens=4), uid=1)
    bad = {
        "empty prompt": Request(prompt(0), SamplingParams(max_tokens=4)),
        "prompt that is too long": Request(prompt(65), SamplingParams(max_tokens=4)),
        "too many max_tokens": Request(prompt(5), SamplingParams(max_tokens=65)),
        "more pages": Request(prompt(64), SamplingParams(max_tokens=32)),
        "outside the vocabulary": Request(Prompt("x", (1, 97), ""), SamplingParams(max_tokens=4)),
        "no samples": Request(prompt(5), SamplingParams(max_tokens=4), n=0),
        "bad top_p": Request(prompt(5), SamplingParams(max_tokens=4, top_p=0.0)),
        "bad uid": Request(prompt(5), SamplingParams(max_tokens=4), uid=-1),
    }
    for reason, request in bad.items():
        with pytest.raises(RequestError, match=reason):
            engine.generate([good, request])
    assert engine.stats.decode_steps == 0 and engine.stats.prefill_tokens == 0
    assert len(list(engine.generate([good]))) == 1  # the others go on


def test_memory_follows_the_tokens_and_not_the_configured_maximum(tiny_config, tiny_params):
    """8192 configured tokens, 12 drawn: the pool is one longest request's, the view is the
    narrowest, and no more pages are in use than the tokens need."""
    config = dataclasses.replace(tiny_config, max_position_embeddings=16384)
    sizes = {
        length: make_engine(config, tiny_params, max_new_tokens=length) for length in (512, 8192)
    }
    assert sizes[512].num_pages >= 8 * (512 + 64) // 4
    assert sizes[8192].num_pages <= max(sizes[512].num_pages, (8192 + 64) // 4 + 4)
    widths = set()
    engine = sizes[8192]
    place = engine._placement.place
    engine._placement.place = lambda *args: (place(*args), widths.add(engine._placement.width))[0]
    requests = [Request(prompt(9, i), SamplingParams(max_tokens=12), uid=i) for i in range(20)]
    assert by_sample(engine.generate(requests)) == by_sample(sizes[512].generate(requests))
    assert widths == {128} and engine.stats.peak_pages <= 8 * 5


def test_peak_memory_grows_with_live_tokens(tiny_config, tiny_params):
    """8192 configured: beside weights and pool, whose size is one longest request's, the device
    holds a view that follows the tokens there are."""
    config = dataclasses.replace(tiny_config, max_position_embeddings=16384)
    engine = make_engine(config, tiny_params, max_new_tokens=8192)
    list(engine.generate([Request(prompt(9, 0), SamplingParams(max_tokens=1), uid=0)]))  # the pool
    gc.collect()
    live = lambda: sum(x.nbytes for x in jax.live_arrays())  # noqa: E731 - short
    idle, peaks = live(), {}
    keep = engine._placement.keep
    for new in (12, 300):
        seen = []
        engine._placement.keep = lambda *args, seen=seen: (keep(*args), seen.append(live()))[0]
        requests = [Request(prompt(9, i), SamplingParams(max_tokens=new), uid=i) for i in range(8)]
        list(engine.generate(requests))
        peaks[new] = max(seen) - idle
    token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim  # bytes, k and v
    drawn = 16 * 64 * 2 * 4  # tokens and log-probabilities of a decode call
    assert 0 < peaks[12] <= 16 * 128 * token + 2 * drawn
    assert 1.5 * peaks[12] < peaks[300] <= 16 * 512 * token + 2 * drawn
    assert live() - idle <= 2 * drawn  # and gives it back


@pytest.mark.full
def test_ten_thousand_requests_leave_memory_flat(tiny_config, tiny_params):
    """Through 16 slots; after the first 2,000 neither arrays nor resident memory grow."""
    engine = make_engine(tiny_config, tiny_params, slots=16, decode_steps=8)
    requests = [
        Request(prompt(1 + i % 12, i), SamplingParams(max_tokens=1 + i % 7, seed=i), uid=i)
        for i in range(10_000)
    ]
    seen = {}
    for count, rollout in enumerate(engine.generate(requests), 1):
        assert len(rollout.tokens) == 1 + int(rollout.prompt.id.split("-")[1]) % 7
        if count in (2_000, 6_000, 9_900):
            gc.collect()
            with open("/proc/self/status") as lines:
                (resident,) = [int(x.split()[1]) for x in lines if x.startswith("VmRSS")]
            seen[count] = len(jax.live_arrays()), resident
    assert count == 10_000 and engine.stats.useful_tokens == sum(1 + i % 7 for i in range(10_000))
    assert seen[2_000][0] == seen[6_000][0] == seen[9_900][0]
    assert seen[9_900][1] - seen[2_000][1] < 8 * 1024  # KiB: one KiB a request


def test_the_models_context_is_a_limit(tiny_config, tiny_params):
    engine = make_engine(tiny_config, tiny_params, max_prompt_tokens=250, max_new_tokens=16)
    with pytest.raises(RequestError, match="context"):
        engine.generate([Request(prompt(245), SamplingParams(max_tokens=12))])
    assert len(list(engine.generate([Request(prompt(245), SamplingParams(max_tokens=11))]))) == 1


def test_new_weights_leave_no_stale_pages(tiny_config, tiny_params):
    """Outputs after `set_params` equal a fresh engine's, and tokens carry the version."""
    other = jax.tree.map(lambda x: x * jnp.float32(0.9), tiny_params)
    engine = make_engine(tiny_config, tiny_params)
    before = list(engine.generate(mixed_requests(5)))
    engine.set_params(other, version=7)
    after = list(engine.generate(mixed_requests(5)))
    fresh = Engine(tiny_config, other, engine.config, version=7)
    assert by_sample(after) == by_sample(fresh.generate(mixed_requests(5)))
    assert by_sample(after) != by_sample(before)
    assert all((r.weights_version == 0).all() for r in before)
    assert all((r.weights_version == 7).all() for r in after)


def test_weights_may_change_under_way(tiny_config, tiny_params):
    """Every token carries the version of the weights that chose it."""
    engine = make_engine(tiny_config, tiny_params, decode_steps=4)
    requests = [
        Request(prompt(5, i), SamplingParams(max_tokens=length), uid=i)
        for i, length in enumerate([4, 12])
    ]
    iterator = engine.generate(requests)
    first = next(iterator)
    engine.set_params(tiny_params, version=1)
    (second,) = iterator
    assert first.weights_version.tolist() == [0] * 4
    assert second.weights_version.tolist() == [0] * 4 + [1] * 8


def test_the_caller_may_donate_its_weights(tiny_config, tiny_params):
    copy = jax.tree.map(jnp.copy, tiny_params)
    engine = make_engine(tiny_config, copy)
    expected = by_sample(engine.generate(mixed_requests(3)))
    jax.tree.map(lambda x: x.delete(), copy)
    assert by_sample(engine.generate(mixed_requests(3))) == expected


def test_compilations_are_bounded(tiny_config, tiny_params):
    """Temperatures, top-p's, seeds, stop ids, lengths and group sizes never compile again."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    sizes = dict(
        slots=6, page_size=8, max_prompt_tokens=100, max_new_tokens=16
    )  # a program of its own
    engine = make_engine(tiny_config, tiny_params, **sizes)
    jax.monitoring.register_event_duration_secs_listener(listen)
    list(engine.generate([Request(prompt(n), SamplingParams(max_tokens=2), n=2) for n in [5, 100]]))
    warm = len(compiled)
    assert 1 <= warm <= engine.stats.programs + 2  # and zeros for the two arrays of a view
    for seed in range(4):
        requests = mixed_requests(20, seed, new=16)
        stops = [
            dataclasses.replace(r, params=dataclasses.replace(r.params, stop_ids=(seed, 40 + i)))
            for i, r in enumerate(requests)
        ]
        list(engine.generate(stops))
    assert len(compiled) == warm
    assert engine.stats.programs <= 4  # prefill, copy, load, decode


def test_one_generate_at_a_time(tiny_config, tiny_params):
    engine = make_engine(tiny_config, tiny_params)
    running = engine.generate(mixed_requests(6))
    next(running)
    with pytest.raises(RequestError, match="already generating"):
        next(engine.generate(mixed_requests(1)))
    running.close()
    expected = by_sample(make_engine(tiny_config, tiny_params).generate(mixed_requests(3)))
    assert by_sample(engine.generate(mixed_requests(3))) == expected  # nothing left behind


def test_logits_that_are_not_numbers_are_told(tiny_config, tiny_params):
    broken = {**tiny_params, "final_norm": tiny_params["final_norm"] * jnp.float32(np.nan)}
    engine = make_engine(tiny_config, broken)
    with pytest.raises(NonFinite):
        list(engine.generate(mixed_requests(2)))


def test_no_requests(tiny_config, tiny_params):
    assert list(make_engine(tiny_config, tiny_params).generate([])) == []


def test_stats_of_a_part(tiny_config, tiny_params):
    engine = make_engine(tiny_config, tiny_params)
    request = Request(prompt(5), SamplingParams(max_tokens=3), n=2)
    list(engine.generate([request]))
    before = engine.stats.snapshot()
    list(engine.generate([request]))
    part = engine.stats.since(before)
    assert (part.decode_steps, part.useful_tokens, part.prefill_tokens) == (3, 6, 5)
    assert part.copied_pages == 1 and part.programs == 0
