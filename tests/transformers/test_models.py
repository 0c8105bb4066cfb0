"""Models of each family with attn_implementation="flashxla", against transformers' own eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.transformers.conftest import FAMILIES, Make, drawn

LENGTH = 21
MASKS = {
    "none": None,
    "left": [[0] * 6 + [1] * 15, [1] * 21, [0] * 13 + [1] * 8],
    "right": [[1] * 15 + [0] * 6, [1] * 21, [1] * 8 + [0] * 13],
    "both": [[0] * 2 + [1] * 15 + [0] * 4, [1] * 21, [0] * 20 + [1]],
    "holes": [[0] * 3 + [1] * 5 + [0] * 4 + [1] * 9, [1] * 21, [1, 0] * 10 + [1]],
    "an empty row": [[0] * 21, [1] * 21, [1] * 8 + [0] * 13],
}
GREEDY = {
    "max_new_tokens": 12,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 258,
    # On a GPU transformers compiles each model with a static cache, half a minute each: test_generate_compiled.
    "disable_compile": True,
}


def ids_of(rows: int = 3, length: int = LENGTH) -> torch.Tensor:
    return drawn(torch.randint, 1, 0, 250, (rows, length))


def each(model: Any, function: Any) -> list[Any]:
    """What a function returns with eager attention, and with ours."""
    results = []
    for name in ("eager", "flashxla"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        with torch.no_grad():
            results.append(function())
    return results


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_forward(make_model: Make, family: str, mask: str) -> None:
    model = make_model(family)
    ids, tokens = ids_of(), torch.tensor(MASKS[mask] or [[1] * LENGTH] * 3)
    positions = (tokens.cumsum(1) - 1).clamp(min=0)
    arguments = {} if MASKS[mask] is None else {"attention_mask": tokens, "position_ids": positions}
    expected, got = each(model, lambda: model(ids, **arguments).logits * tokens[..., None])
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences(make_model: Make, family: str) -> None:
    """Positions that begin anew: each sequence as if it were alone, in rows of their own."""
    model = make_model(family)
    model.set_attn_implementation("eager")
    ids = ids_of(2)
    lengths = ([5, 9, 7], [20, 1])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with torch.no_grad():
        expected = torch.stack(
            [
                torch.cat([model(part[None]).logits[0] for part in ids[i].split(row)])
                for i, row in enumerate(lengths)
            ]
        )
        model.set_attn_implementation("flashxla")
        got = model(ids, position_ids=positions, use_cache=False).logits
        flat = model(ids.reshape(1, -1), position_ids=positions.reshape(1, -1), use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(flat.reshape_as(expected), expected, atol=2e-4, rtol=1e-4)


POSITIONS = {
    "restart": [*range(9), *range(LENGTH - 9)],
    "gap": [*range(9), *range(200, 200 + LENGTH - 9)],
    "both": [*range(9), *range(30, 35), *range(LENGTH - 14)],
}


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize("how", [lambda model: model, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
def test_rows_of_a_mask_are_not_packed(make_model: Make, positions: str, use_cache: bool, how: Any) -> None:
    """Whatever the positions: as eager attention has it, and whatever pads the other rows."""
    model = make_model("llama")
    ids, rows = ids_of(2), torch.tensor([POSITIONS[positions]]).expand(2, -1)
    for tokens in ([[1] * LENGTH] * 2, [[1] * LENGTH, [0] + [1] * (LENGTH - 1)]):
        mask = torch.tensor(tokens)
        arguments = {"attention_mask": mask, "position_ids": rows, "use_cache": use_cache}
        expected, got = each(model, lambda a=arguments: how(model)(ids, **a).logits)
        torch.testing.assert_close(got * mask[..., None], expected * mask[..., None], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("how", [lambda model: model, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
def test_where_packed_sequences_begin(make_model: Make, positions: str, use_cache: bool, how: Any) -> None:
    """Without a mask: where a position is not larger than the one before it, with and without a cache."""
    model = make_model("llama")
    ids, row = ids_of(1), torch.tensor([POSITIONS[positions]])
    starts = [i for i in range(1, LENGTH) if row[0, i] <= row[0, i - 1]]
    lengths = torch.tensor([0, *starts, LENGTH]).diff().tolist()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        # With a mask, of ones, eager attention does not look at the positions.
        expected = torch.cat(
            [
                model(part, attention_mask=torch.ones_like(part), position_ids=places).logits
                for part, places in zip(ids.split(lengths, 1), row.split(lengths, 1), strict=True)
            ],
            dim=1,
        )
        model.set_attn_implementation("flashxla")
        got = how(model)(ids, position_ids=row, use_cache=use_cache).logits
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


def test_positions_that_change_in_place(make_model: Make) -> None:
    """What was made of a tensor's first values must not be used for its next."""
    model = make_model("llama")
    model.set_attn_implementation("flashxla")
    ids, positions = ids_of(1), torch.arange(LENGTH)[None].clone()
    with torch.no_grad():
        whole = model(ids, position_ids=positions, use_cache=False).logits
        positions.copy_(torch.cat([torch.arange(9), torch.arange(12)])[None])
        parts = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(parts[:, :9], whole[:, :9])
        torch.testing.assert_close(parts[:, 9:], model(ids[:, 9:]).logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(make_model: Make, family: str, cache: str) -> None:
    model = make_model(family)
    ids, tokens = ids_of(), torch.tensor(MASKS["left"])
    if cache == "static" and family == "deepseek_v3":
        pytest.skip("transformers' static cache has no room for values smaller than keys")

    def run() -> list[torch.Tensor]:
        alone = model.generate(ids[:1], cache_implementation=cache, **GREEDY)
        return [alone, model.generate(ids, attention_mask=tokens, cache_implementation=cache, **GREEDY)]

    expected, got = each(model, run)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_generate_compiled(make_model: Make, device: str) -> None:
    """A static cache on a GPU, as transformers compiles it by itself."""
    if device == "cpu":
        pytest.skip("transformers compiles a model with a static cache on GPUs alone")
    model = make_model("gemma2")
    options = GREEDY | {"cache_implementation": "static", "disable_compile": False}
    expected, got = each(
        model, lambda: model.generate(ids_of(), attention_mask=torch.tensor(MASKS["left"]), **options)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_generate_with_holes(make_model: Make, family: str, cache: str) -> None:
    """Windows that a hole leaves one token after the other."""
    model = make_model(family)
    ids, tokens = ids_of(), torch.tensor(MASKS["holes"])
    expected, got = each(
        model, lambda: model.generate(ids, attention_mask=tokens, cache_implementation=cache, **GREEDY)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("mask", ["none", "left", "holes"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_steps_compiled_once(make_model: Make, family: str, mask: str) -> None:
    """As transformers compiles a step with a static cache: the masks of all steps are one program's.

    Not for windows: transformers' own cache for them counts its tokens in a number, which each step is compiled for.
    """
    model = make_model(family)
    compile_config = transformers.CompileConfig(backend="eager", dynamic=False)
    compile_config._compile_all_devices = True
    options = GREEDY | {"disable_compile": False, "compile_config": compile_config}
    tokens = torch.tensor(MASKS[mask] or [[1] * LENGTH] * 3)
    run = lambda: model.generate(ids_of(), attention_mask=tokens, cache_implementation="static", **options)  # noqa: E731
    # Programs of earlier tests, or of the other attention, are not those of this one.
    torch.compiler.reset()
    with torch.compiler.set_stance("force_eager"):
        expected = each(model, run)[0]
    model.set_attn_implementation("flashxla")
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = run()
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert torch.equal(got, expected)


@pytest.mark.parametrize("beams", [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}], ids=str)
def test_beam_search(make_model: Make, beams: dict[str, int]) -> None:
    model = make_model("mistral")
    run = lambda: model.generate(ids_of(), attention_mask=torch.tensor(MASKS["left"]), **GREEDY, **beams)  # noqa: E731
    expected, got = each(model, run)
    assert torch.equal(got, expected)


def test_static_cache_without_a_mask(make_model: Make) -> None:
    """What the cache holds behind the last token is none, said or not."""
    model = make_model("gemma2")
    ids = ids_of()

    def run() -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        first = model(ids, past_key_values=cache).logits
        return torch.cat([first, model(ids[:, :4], past_key_values=cache).logits], dim=1)

    expected, got = each(model, run)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


_TINY = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODERS = {
    "bert": lambda: transformers.BertConfig(**_TINY, intermediate_size=64),
    "modernbert": lambda: transformers.ModernBertConfig(
        **_TINY,
        intermediate_size=64,
        local_attention=8,
        global_attn_every_n_layers=2,
        **dict.fromkeys(
            ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 258
        ),
    ),
}


@pytest.mark.parametrize("mask", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(make_model: Make, family: str, mask: str) -> None:
    model = make_model(ENCODERS[family](), transformers.AutoModel)
    ids, tokens = ids_of(), torch.tensor(MASKS[mask] or [[1] * LENGTH] * 3)
    run = lambda: model(ids, attention_mask=tokens).last_hidden_state * tokens[..., None]  # noqa: E731
    expected, got = each(model, run)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
def test_encoders_are_not_packed(make_model: Make, positions: str) -> None:
    """Whatever the positions, as eager attention has it."""
    config = ENCODERS["bert"]()
    config.max_position_embeddings = 256
    model = make_model(config, transformers.AutoModel)
    row = torch.tensor([POSITIONS[positions]])
    expected, got = each(model, lambda: model(ids_of(1), position_ids=row).last_hidden_state)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_encoder_and_decoder(make_model: Make) -> None:
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 32)
    config = transformers.BartConfig(
        vocab_size=259, max_position_embeddings=64, pad_token_id=258, init_std=0.3, **heads, **layers, **sizes
    )
    model = make_model(config, transformers.AutoModelForSeq2SeqLM)
    ids, tokens = ids_of(), torch.tensor(MASKS["right"])
    # As many tokens in the decoder as in the encoder: the encoder's padding is not the decoder's.
    for length in (7, LENGTH):
        run = lambda n=length: model(ids, attention_mask=tokens, decoder_input_ids=ids[:, :n]).logits  # noqa: E731
        expected, got = each(model, run)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    expected, got = each(
        model, lambda: model.generate(ids, attention_mask=tokens, max_new_tokens=8, do_sample=False)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("mask", ["none", "left", "holes"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_without_a_break(make_model: Make, family: str, mask: str) -> None:
    model = make_model(family)
    model.set_attn_implementation("flashxla")
    ids, tokens = ids_of(), torch.tensor(MASKS[mask] or [[1] * LENGTH] * 3)
    arguments = {} if MASKS[mask] is None else {"attention_mask": tokens}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = model(ids, use_cache=False, **arguments).logits * tokens[..., None]
        got = compiled(ids, use_cache=False, **arguments).logits * tokens[..., None]
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


def test_from_pretrained(make_model: Make, tmp_path: Any) -> None:
    """GPT-OSS lists the kernels it knows, and transformers would take the first of them."""
    make_model("gpt_oss").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flashxla")
    assert model.config._attn_implementation == "flashxla"
    expected, got = each(model, lambda: model(ids_of()).logits)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
