"""Files below one directory in any file system of Hadoop: local, HDFS, object stores. Used by pipelines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class HadoopFiles:
    """Files by their names below `root`. Errors of the file system are raised as py4j raises them."""

    def __init__(self, session: Any, root: str) -> None:
        self._jvm = session._jvm
        self._root = root
        # With the settings of the session: credentials of object stores are among them.
        self._conf = session._jsparkSession.sessionState().newHadoopConf()
        self._files = self._java_path("").getFileSystem(self._conf)

    def path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def read(self, name: str) -> str | None:
        """The text of a file; None if it does not exist."""
        path = self._java_path(name)
        if not self._files.exists(path):
            return None
        stream = self._files.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def create(self, name: str, content: bytes, *, aside: str) -> bool:
        """Write the file `aside` and move it to `name`, so that it is complete as soon as it exists.

        False if `name` exists already: of several callers one succeeds. In an object store, whose renames are copies,
        more than one may succeed at the same moment; the file is then that of the last one.
        """
        path, unfinished = self._java_path(name), self._java_path(aside)
        stream = self._files.create(unfinished, False)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()
        if (created := self._linked(unfinished, path)) is not None:
            return created
        # Checked before: some file systems replace the file. HDFS does not.
        return not self._files.exists(path) and bool(self._files.rename(unfinished, path))

    def _linked(self, unfinished: Any, path: Any) -> bool | None:
        """Link a local file to a second path: unlike Hadoop's rename, this fails if the path exists. None if the file
        system is not local, or has no hard links."""
        if str(self._files.getUri().getScheme()) != "file":
            return None
        try:
            os.link(str(unfinished.toUri().getPath()), str(path.toUri().getPath()))
        except FileExistsError:
            return False
        except OSError:
            return None
        self._files.delete(unfinished, False)
        return True

    def upload(self, local: Path, name: str) -> None:
        """Move a file of this host to `name`."""
        source = self._jvm.org.apache.hadoop.fs.Path(local.absolute().as_uri())
        self._files.mkdirs(self._java_path(name).getParent())
        local_files = self._jvm.org.apache.hadoop.fs.FileSystem.getLocal(self._conf)
        # Not `copyFromLocalFile`: in S3A it has an HTTP client of its own, whose requests some stores refuse.
        copied = self._jvm.org.apache.hadoop.fs.FileUtil.copy(
            local_files, source, self._files, self._java_path(name), True, True, self._conf
        )
        if not copied:
            raise OSError(f"The file system has not stored {self.path(name)}.")

    def listed(self, name: str) -> list[tuple[str, int]]:
        """The paths and sizes of the files in a directory, without hidden ones (`_SUCCESS`)."""
        found = []
        for status in self._files.listStatus(self._java_path(name)):
            path = status.getPath()
            if status.isFile() and not path.getName().startswith(("_", ".")):
                found.append((str(path.toString()), int(status.getLen())))
        return sorted(found)

    def size(self, name: str) -> int:
        """The bytes of all files in a directory, also of those that are being written; 0 if it does not exist."""
        path = self._java_path(name)
        return int(self._files.getContentSummary(path).getLength()) if self._files.exists(path) else 0

    def directories(self, name: str) -> list[str]:
        """The names of the directories in a directory."""
        found = self._files.listStatus(self._java_path(name))
        return sorted(str(status.getPath().getName()) for status in found if status.isDirectory())

    def delete(self, name: str) -> None:
        """Delete a directory, if it exists."""
        self._files.delete(self._java_path(name), True)

    def _java_path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.path(name))
