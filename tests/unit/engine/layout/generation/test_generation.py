"""What a text is made of, without ranks: the next token, what is printed, what is refused."""

from typing import Any

import pytest
import torch

from nbdist.engine.layout.generation import loop, refused, stages
from nbdist.engine.layout.generation.streamed_text import StreamedText
from nbdist.engine.layout.plan.mesh import parse
from nbdist.shared.errors import LayoutError


def test_of_the_top_k_alone_one_is_drawn() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]]).repeat(500, 1)
    drawn = loop.Choice(1, do_sample=True, top_k=2).next_of(logits)
    assert drawn.unique().tolist() == [1, 2]
    share = (drawn == 1).float().mean().item()
    assert share == pytest.approx(1 / (1 + torch.e**-1), abs=0.07)


def test_a_high_temperature_draws_all_tokens_nearly_as_often() -> None:
    torch.manual_seed(0)
    drawn = loop.Choice(1, do_sample=True, temperature=100.0).next_of(torch.eye(4)[[0] * 800])
    assert drawn.bincount().min().item() > 150


def test_what_follows_an_end_is_padding_and_all_ends_end_the_text() -> None:
    after = torch.tensor([0, 2, 3, 4, 4])  # 4 ends a text, and comes two tokens after 2

    def call(ids: torch.Tensor) -> torch.Tensor:
        return torch.eye(5)[after[ids]]

    ids = loop.run(
        call,
        torch.tensor([[3], [1]]),
        loop.Choice(9, eos_token_id=4, pad_token_id=0),
        streamer=None,
        is_synced=False,
    )
    assert ids.tolist() == [[3, 4, 0, 0], [1, 2, 3, 4]]


def test_bytes_of_half_a_letter_wait_for_the_other_half(capsys: pytest.CaptureFixture[str]) -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    text = StreamedText(Bytes(), is_shown=True)
    shown = []
    text.put(torch.tensor([list(b"caf"), list(b"tea")]))
    for byte in "é!".encode():
        text.put(torch.tensor([byte, 0]))
        shown.append(capsys.readouterr().out)
    text.end()
    assert shown == ["caf", "é", "!"]
    assert capsys.readouterr().out == "\n"


@pytest.mark.parametrize(
    ("layout", "options", "is_refused"),
    [
        ("ddp", {"prefill_chunk_size": 4}, False),
        ("zero3", {"prefill_chunk_size": 4}, True),
        ("tp=2", {"output_hidden_states": True}, False),
        ("pp=2", {"output_hidden_states": True}, True),
        ("pp=2", {"output_hidden_states": False}, False),
        ("ddp", {"prompt_lookup_num_tokens": 3}, True),
    ],
)
def test_an_option_is_refused_where_ranks_cannot_follow_it(
    layout: str, options: dict[str, Any], is_refused: bool
) -> None:
    shape = parse(layout, 2)
    if is_refused:
        with pytest.raises(LayoutError, match=f"does not take {next(iter(options))}"):
            refused.refuse_options(shape, options, None)
    else:
        refused.refuse_options(shape, options, None)


def test_an_option_of_the_models_own_configuration_counts_as_given() -> None:
    class Configuration:
        cache_implementation = "static"

    with pytest.raises(LayoutError, match="cache_implementation"):
        refused.refuse_options(parse("pp=2", 2), {}, Configuration())


def test_a_cache_without_lengths_is_refused_under_pp() -> None:
    class Mambas:
        layers = (object(),)

    with pytest.raises(LayoutError, match="does not know a Mambas"):
        stages._length(Mambas())


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("hello", "got text, and takes ids"),
        (["a", "b"], 'tokenizer(text, return_tensors="pt")'),
        ([[1, 2, 3], [4, 5]], "pad prompts of other lengths"),
        ([], "it is empty"),
        (5, "got no prompt: 5"),
    ],
)
def test_prompts_that_are_none_are_refused_in_words(inputs: Any, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        refused.as_ids(inputs)
    assert words in str(caught.value)


@pytest.mark.parametrize("count", [-2, 0, 2.5, True])
def test_a_number_of_tokens_is_a_whole_one(count: Any) -> None:
    with pytest.raises(LayoutError, match="max_new_tokens"):
        refused.refuse_count(count)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_k": -1}])
def test_numbers_that_no_token_can_be_drawn_by_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match=next(iter(options))):
        loop.Choice(1, do_sample=True, **options)


def test_a_top_k_of_0_is_none_as_transformers_has_it() -> None:
    torch.manual_seed(0)
    drawn = loop.Choice(1, do_sample=True, top_k=0).next_of(torch.zeros(200, 3))
    assert drawn.unique().tolist() == [0, 1, 2]
