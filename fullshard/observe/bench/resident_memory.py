"""Memory of this process as the kernel counts it, for devices whose allocator keeps no count."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # written to CLEAR


@dataclass
class Resident:
    """Growth of the resident memory since `begin`."""

    before: int

    @classmethod
    def begin(cls) -> Self:
        return cls(_bytes("VmRSS:"))

    def reset(self) -> None:
        """Count the peak anew. Where the kernel does not allow that, it is the peak of the whole process."""
        with suppress(OSError):
            CLEAR.write_text(RESET_PEAK)

    def peak(self) -> int:
        return max(0, _bytes("VmHWM:") - self.before)


def _bytes(name: str) -> int:
    """A line of the kernel's, 0 where there is none."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)
