"""Make of a published program what MLflow knows as a model, and register it.

Runs in the shipping process. A rank has written `data/model.pt2` and `example.json`; what MLflow
wants to know beside them is written here, without importing torch: MLflow's own `save_model` wants
the model itself, whose class is nowhere but in the notebook.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TAG = "nbdist.folder"  # of a version: which folder of the spool it was, to make it once


def publish(client: Any, run_id: str, folder: Path, facts: Mapping[str, Any]) -> None:
    """Log a model to its run, register it, and set its alias. What was done before is not redone.

    Args:
        client: An `MlflowClient`.
        run_id: The run's.
        folder: What the rank has written.
        facts: What it has reported of it; see `engine/layout/publish`.
    """
    name, place = facts["name"], f"models/{folder.name}"
    _complete(folder, facts, run_id, place)
    version = _version(client, name, run_id, folder.name)
    if version is None:
        client.log_artifacts(run_id, str(folder), place)
        source = f"{client.get_run(run_id).info.artifact_uri.rstrip('/')}/{place}"
        made = client.create_model_version(name, source, run_id=run_id, tags={_TAG: folder.name})
        version = made.version
    if facts["alias"]:
        client.set_registered_model_alias(name, facts["alias"], str(version))
    client.set_tag(run_id, "nbdist.model", f"{name} version {version}")


def _version(client: Any, name: str, run_id: str, folder: str) -> Any:
    """Return the version that an earlier attempt has made, or None; make the model's own entry."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    found = client.search_model_versions(f"name = '{name}'")
    mine = (v.version for v in found if (v.run_id, v.tags.get(_TAG)) == (run_id, folder))
    return next(mine, None)


def _complete(folder: Path, facts: Mapping[str, Any], run_id: str, place: str) -> None:
    """Write what MLflow wants to know of the program: its flavors, signature and environment."""
    import mlflow
    import numpy as np
    from mlflow.models import Model, ModelSignature
    from mlflow.pyfunc import add_to_model
    from mlflow.types import Schema, TensorSpec

    def schema(end: tuple[str, list[int]]) -> Schema:
        dtype, shape = end
        return Schema([TensorSpec(np.dtype(dtype), tuple(shape))])

    signature = ModelSignature(inputs=schema(facts["inputs"]), outputs=schema(facts["outputs"]))
    model = Model(artifact_path=place, run_id=run_id, signature=signature)
    model.add_flavor("pytorch", model_data="data", pytorch_version=facts["torch"], code=None)
    add_to_model(  # type: ignore[no-untyped-call]
        model,
        loader_module="mlflow.pytorch",
        data="data",
        python_env="python_env.yaml",
        model_config={"device": None},
    )
    model.save(str(folder / "MLmodel"))
    torch = facts["torch"].partition("+")[0]
    wanted = [f"mlflow=={mlflow.__version__}", f"torch=={torch}", f"numpy=={np.__version__}"]
    (folder / "requirements.txt").write_text("\n".join(wanted) + "\n", encoding="utf-8")
    (folder / "python_env.yaml").write_text(
        f'python: "{facts["python"]}"\nbuild_dependencies: [pip]\n'
        "dependencies: [-r requirements.txt]\n",
        encoding="utf-8",
    )
