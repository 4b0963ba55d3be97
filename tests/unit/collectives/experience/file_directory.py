"""Directory for processes of this host: a folder with a file per key, which is replaced atomically."""

import os
import tempfile
from urllib.parse import quote, unquote


class FileDirectory:
    def __init__(self, folder):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def announce(self, key, value):
        descriptor, draft = tempfile.mkstemp(dir=self._folder, prefix=".")
        with os.fdopen(descriptor, "w") as file:
            file.write(value)
        os.replace(draft, self._folder / quote(key, safe=""))

    def announced(self, prefix):
        paths = {unquote(path.name): path for path in self._folder.glob("[!.]*")}
        return {key: path.read_text() for key, path in sorted(paths.items()) if key.startswith(prefix)}
