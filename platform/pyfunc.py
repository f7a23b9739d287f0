"""Where MLflow models saved before version 0.2 look for their loader."""

from crossfed.platform.serving.pyfunc import *  # noqa: F403
