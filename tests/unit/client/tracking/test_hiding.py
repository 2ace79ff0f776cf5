"""Secrets that nobody reads: what belongs to a name that sounds secret, whoever holds it."""

import pytest

from nbdist.client.tracking.hiding import HIDDEN, hide_in_code, hide_secrets, sounds_secret

NAMES = [
    "password",
    "api_key",
    "HF_TOKEN",
    "Authorization",
    "X-Api-Key",
    "clientSecret",
    "dbpasswd",
]
# How code gives a value to a name, where the name may be any text (%s), or an identifier (%n).
HOLDERS = [
    "h = {'a': 1, '%s': 'hunter2'}",
    "h['%s'] = 'hunter2'",
    "h['%s'] = f'hunter2{x}'",
    "h.setdefault('%s', 'hunter2')",
    "hs = [('%s', b'hunter2')]",
    "os.getenv('%s', 'hunter2')",
    "if h['%s'] == 'hunter2': pass",
    "{'%s': ('hun'\n  'ter2hunter2')}",
    "%n = 'hunter2'",
    "self.%n: str = x or 'hunter2'",
    "a, %n = 'me', 'hunter2'",
    "connect(%n='hunter2')",
    "connect(%n=b64decode('hunter2'))",
    "def connect(a, %n='hunter2', *, b=1): pass",
    "client.set_%n('hunter2')",
    "%load_ext nbdist\n!ls | wc\nx = !ls\nconnect(%n = \\\n 'hunter2')",
    "%env %n=hunter2",
    "# %%distributed -p %n=hunter2",
    "!curl --%n hunter2 x",
    "'https://example.org/x?a=b&%n=hunter2'",
]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("name", NAMES)
def test_what_belongs_to_a_secrets_name_is_hidden_whoever_holds_it(name: str, holder: str) -> None:
    identifier = name.replace("-", "_")
    code = holder.replace("%s", name).replace("%n", identifier)
    hidden = hide_in_code(code)
    assert "hunter2" not in hidden
    assert hidden.count(HIDDEN) == 1


@pytest.mark.parametrize(
    "code",
    [
        "'https://example.org/x?sig=hunter2'",
        "'https://me:hun@ter:hunter2@example.org'",
        "huggingface_hub.login('hunter2')",
        "wandb.login(key='hunter2')",
        "auth = ('me', 'hunter2')",
        "é = 'é'; password = 'hunter2'",
        'password = """hunter2\nhunter2"""',
    ],
)
def test_and_what_is_known_for_a_credential_by_its_place(code: str) -> None:
    assert "hunter2" not in hide_in_code(code)


@pytest.mark.parametrize(
    "code",
    [
        "for x, y in loader:\n    loss = f(x)  # see http://example.org:80/a@b\n",
        "tokenizer = load('gpt2', pad_token='<pad>', eos_token='</s>')",
        "token = 'a'; next_token = 'the cat'; keys = {'key': 'value'}",
        "password = os.environ['DB_PASSWORD']; key = os.getenv('API_KEY')",
        "headers = {'Authorization': f'Bearer {token}'}",
        "d.sort(key='author'); authors = 'all of them'; tokens = 'abcdef'[0]",
        "clone('ssh://git@github.com/a/b?ref=main')",
        "%pip install a\nthis is no Python at all\n!ls",
    ],
)
def test_ordinary_code_is_kept_letter_by_letter(code: str) -> None:
    assert hide_in_code(code) == code


@pytest.mark.parametrize("name", ["tokens", "max_tokens", "author", "tokenizer", "sort_key"])
def test_names_that_only_sound_like_it(name: str) -> None:
    assert not sounds_secret(name)


@pytest.mark.parametrize(
    "text",
    [
        "login('hf_abcdefghijklmnopqrstuvwx')",
        "ghp_0123456789abcdefghijABCDEFGHIJ0123",
        "sk-proj-abcdefghijklmnop1234",
        "AKIAIOSFODNN7EXAMPLE",
        "postgresql://me:hunter2@db/mlflow",
    ],
)
def test_what_has_the_form_of_a_secret_is_hidden_in_any_text(text: str) -> None:
    assert HIDDEN in hide_secrets(text)
    assert "hunter2" not in hide_secrets(text)


def test_ordinary_text_is_kept_letter_by_letter() -> None:
    source = "for x, y in loader:\n    loss = f(x)  # see http://example.org:80/a@b\n"
    assert hide_secrets(source) == source


@pytest.mark.parametrize(
    "text",
    [
        'password = "hunter2"',
        "-p api_token='hunter2'",
        'os.environ["HF_TOKEN"] = "hunter2"',
        r'"os.environ[\"MLFLOW_TRACKING_PASSWORD\"] = \"hunter2\"\n"',
        "http://me:hunter2@example.org",
    ],
)
def test_what_is_named_a_secret_is_hidden(text: str) -> None:
    assert "hunter2" not in hide_secrets(text)


@pytest.mark.parametrize(
    "text", ['pad_token="<pad>"', 'tokenizer = "gpt2"', "tokens = 'abcdef'[0]"]
)
def test_tokenizers_are_no_secret(text: str) -> None:
    assert hide_secrets(text) == text
