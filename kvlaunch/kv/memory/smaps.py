"""How much of a region is resident, as the kernel sees it (proc_pid_smaps(5))."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int, address: int, nbytes: int) -> int:
    """Resident bytes of process `pid` between address and address + nbytes.

    The kernel splits a region where its protection changes, so this is the sum over all mappings in the range. A
    mapping that reaches out of the range counts for at most the bytes that it has inside.

    Raises:
        OSError: no such process, or not ours to look into.
    """
    total = inside = 0
    with Path(f"/proc/{pid}/smaps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("Rss:"):
                if inside:
                    total += min(int(line.split()[1]) * 1024, inside)
            elif line[0] in "0123456789abcdef":
                start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
                inside = max(0, min(end, address + nbytes) - max(start, address))
    return total
