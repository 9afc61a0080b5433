"""Settings of every test: quiet libraries, no hub, one thread."""

import os
import tempfile

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# trackio reads it when it is first imported, whichever test that is: never the user's own store.
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")
