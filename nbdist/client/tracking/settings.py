"""Decide where runs go, and with which environment MLflow's processes start."""

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nbdist.shared.errors import UsageError

DATABASE = "mlflow.db"
# The whole URI of a database with a password, for the processes that open it; see `split_password`.
WHOLE_URI = "NBDIST_TRACKING_URI"


def tracking_uri(folder: Path, uri: str | None, environment: Mapping[str, str]) -> str:
    """Return the tracking URI: the one asked for, MLFLOW_TRACKING_URI, or our own database.

    A relative SQLite path is made absolute now: the kernel may change its folder later, and the
    run must find the same file when it is sent.
    """
    chosen = uri or environment.get("MLFLOW_TRACKING_URI") or ""
    if not chosen:
        return own_database(folder)
    prefix = "sqlite:///"
    if chosen.startswith(prefix) and not chosen.startswith(prefix + "/"):
        return prefix + str(Path(chosen.removeprefix(prefix)).absolute())
    return chosen.rstrip("/")


# MLflow's own, in tracking/_tracking_service/utils.py. Databases take a driver: mysql+pymysql.
_STORES = ("file", "http", "https", "sqlite", "postgresql", "mysql", "mssql")
_OF_DATABRICKS = ("databricks", "databricks-uc", "uc")


def require_store(uri: object) -> None:
    """Refuse what MLflow, or a plugin of it that is installed here, can keep no runs at.

    Raises:
        UsageError: It is no URI of a tracking store; None stands for the default.
    """
    if uri is None:
        return
    if not isinstance(uri, str):
        raise UsageError(f"tracking_uri is a text, such as http://host:5000, not {uri!r}.")
    scheme = urlsplit(uri).scheme.partition("+")[0]
    plugins = {plugin.name for plugin in entry_points(group="mlflow.tracking_store")}
    if scheme not in ("", *_STORES, *_OF_DATABRICKS, *plugins):
        raise UsageError(
            f"MLflow keeps no runs at {shown_uri(uri)}.",
            why=f"a tracking URI begins with {', '.join(_STORES[:-1])} or {_STORES[-1]}",
            do="give one, such as http://host:5000, or leave it out",
        )


def own_database(folder: Path) -> str:
    """Return the URI of the SQLite file in the private folder."""
    return f"sqlite:///{folder.absolute() / DATABASE}"


def own_artifacts(folder: Path, uri: str, experiment: str) -> str | None:
    """Return where an experiment's files go if its runs go to our own database, else None."""
    if uri != own_database(folder):
        return None
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in experiment).lstrip(".")
    return (folder.absolute() / "artifacts" / (name or "_")).as_uri()


def is_server(uri: str) -> bool:
    """Return whether `uri` names a running MLflow server, which has a UI of its own."""
    return uri.startswith(("http://", "https://"))


def shown_uri(uri: str) -> str:
    """Return `uri` for people: without the password it may hold."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def split_password(uri: str) -> tuple[str, dict[str, str]]:
    """Return `uri` as it may be written down, and the environment that holds its password.

    Only the processes that talk to MLflow get that environment: neither the spool, nor a log, a
    command line or a rank ever sees it.
    """
    parts = urlsplit(uri)
    if parts.password is None:
        return uri, {}
    if not is_server(uri):
        user = f"{parts.username}@" if parts.username else ""
        place = parts._replace(netloc=user + parts.netloc.rpartition("@")[2])
        return place.geturl(), {WHOLE_URI: uri}
    return shown_uri(uri), {
        "MLFLOW_TRACKING_USERNAME": unquote(parts.username or ""),
        "MLFLOW_TRACKING_PASSWORD": unquote(parts.password),
    }


def whole_uri(uri: str, environment: Mapping[str, str]) -> str:
    """Return the URI to open for one that is written down: with its password, where we have it."""
    whole = environment.get(WHOLE_URI, "")
    return whole if whole and split_password(whole)[0] == uri else uri


def mlflow_environment(
    environment: Mapping[str, str], credentials: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for a process that runs MLflow: telemetry off unless turned on.

    The user turns it on with MLFLOW_DISABLE_TELEMETRY=false.

    Args:
        environment: The kernel's own.
        credentials: What `split_password` found.
    """
    own = {**environment, **(credentials or {})}
    if "MLFLOW_DISABLE_TELEMETRY" not in own:
        own["MLFLOW_DISABLE_TELEMETRY"] = "true"
        own.setdefault("DO_NOT_TRACK", "true")
    # One attempt a call: we repeat calls ourselves, at our own pace. MLflow's seven attempts
    # with back-off block for four minutes.
    own["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    own.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    own["MLFLOW_ENABLE_ASYNC_LOGGING"] = "false"
    own["GIT_PYTHON_REFRESH"] = "quiet"
    home = str(Path(__file__).resolve().parents[3])
    paths = own.get("PYTHONPATH", "").split(os.pathsep)
    if home not in paths:
        own["PYTHONPATH"] = os.pathsep.join([home, *filter(None, paths)])
    return own
