"""The trained model of one domain, ready to recommend: from a run's folder, or as an MLflow pyfunc,
loaded without pickle.

    model = mlflow.pyfunc.load_model("models:/m-…")                 # or models:/<registered name>/1
    model.predict(pandas.DataFrame({"user": ["A2X3"], "k": [10]}))  # the source's own ids in, and out

It loads in a fresh process without the run, its data or a network, and knows nothing of other
domains. Interactions never leave their domain, so the model does not know what a user has already
seen: items are left out only when the caller names them in `exclude`. User ids do not leave either:
the model holds a keyed 64-bit digest of each, enough to recognise an id that is asked for. That is
a pseudonym, not secrecy: whoever holds the model can test a guess.
"""  # noqa: E501

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from pathlib import Path

from crossfed.platform.federation.export import files

_CODE = """from crossfed.platform.serving.pyfunc import Recommender
from mlflow.models import set_model

set_model(Recommender())
"""


def save(run_dir: Path, domain: str, path: Path) -> None:
    """Write one domain's model of a finished run as an MLflow model directory.

    Args:
        run_dir: holds `config.yaml` and `model/`.
        path: the directory to make; must not exist.
    """
    import mlflow.pyfunc

    from crossfed.platform.serving.pyfunc import EXAMPLE, SIGNATURE

    with tempfile.TemporaryDirectory() as folder:
        code, own = Path(folder) / "recommender.py", Path(folder) / "model"
        code.write_text(_CODE, "utf-8")
        own.mkdir()
        for file in files(run_dir / "model", domain):
            shutil.copyfile(file, own / file.name)
        mlflow.pyfunc.save_model(
            path=path,
            python_model=str(code),
            artifacts={"config": str(run_dir / "config.yaml"), "model": str(own)},
            signature=SIGNATURE,
            input_example=EXAMPLE,
            pip_requirements=[_requirement(name) for name in ("crossfed", "mlflow", "torch")],
            metadata={"domain": domain},
        )


def _requirement(package: str) -> str:
    """The installed version, without a local part such as +cpu that no index carries."""
    return f"{package}=={importlib.metadata.version(package).partition('+')[0]}"
