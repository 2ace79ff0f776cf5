"""What stays of a live board where its widgets do not."""

from nbdist.client.board.kept import MOST_BYTES, kept
from nbdist.client.board.palette import theme_named

AUTO = theme_named("auto")


def test_it_says_from_when_it_is_and_what_is_seen_and_shows_it() -> None:
    display = kept("73 [00:12]\nStep 73, loss <1.", b"png", AUTO, "14:03:20")

    first, *said = display.data["text/plain"].splitlines()
    assert "14:03:20" in first
    assert "%dist board" in first
    assert said == ["73 [00:12]", "Step 73, loss <1."]
    html = display.data["text/html"]
    assert 'alt="73 [00:12]\nStep 73, loss &lt;1."' in html
    assert f"base64,{display.data['image/png']}" in html
    assert display.metadata["image/png"]["width"] == 960


def test_a_picture_that_would_bloat_the_file_is_left_out_and_the_words_stay() -> None:
    display = kept("Step 73.", b"x" * (MOST_BYTES + 1), AUTO, "14:03:20")

    assert set(display.data) == {"text/plain", "text/html"}
    assert "<img" not in display.data["text/html"]
    assert "Step 73." in display.data["text/html"]
