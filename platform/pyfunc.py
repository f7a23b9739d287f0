"""Where MLflow models look for their loader that were saved before it moved to `serving`."""

from crossfed.platform.serving.pyfunc import *  # noqa: F403
