"""Which NCCL would load the plugin, and with which table?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagua.net import native
from bagua.net.activation import Surroundings
from bagua.net.doctor.finding import Finding, Section, Status, fail, ok, skip, warn
from bagua.net.nccl_library import NcclLibrary, TorchInstallation
from bagua.net.nccl_release import NcclRelease
from bagua.net.plugin_setting import default_name_finds


def check_nccl(
    libraries: Sequence[NcclLibrary],
    torch: TorchInstallation | None,
    environment: Mapping[str, str],
    surroundings: Surroundings | None,
    *,
    reopens_by_name: bool,
    has_gpu: bool = True,
) -> Section:
    """The first library is the one that a job takes: only its problems are failures. `reopens_by_name`: see
    [Note: opened again] in library_check.py."""
    if not libraries:
        findings = [_no_nccl(torch) if has_gpu else skip("skipped: no GPU, and no NCCL, on this machine")]
    else:
        findings = [_check(libraries[0], Status.FAIL, environment, surroundings)]
        release = libraries[0].release
        if surroundings is not None and release is not None and release.forgets_plugin_name and not reopens_by_name:
            findings.append(_forgetful(release))
        findings += [_check(library, Status.WARN, environment, surroundings) for library in libraries[1:]]
    facts = {
        "torch": None if torch is None else {"version": torch.version, "cuda": torch.has_cuda},
        "libraries": [
            {
                "path": str(library.path),
                "owner": library.owner,
                "origin": library.origin,
                "version": None if library.release is None else str(library.release),
                "table": None if library.release is None else library.release.table,
                "problem": library.problem,
            }
            for library in libraries
        ],
    }
    return Section("nccl", "NCCL", tuple(findings), facts)


def check_tuning(environment: Mapping[str, str], *, settings_fail: bool) -> Section:
    """
    Who chooses channels, algorithm and protocol of the collectives of a job over the plugin, and why?

    Args:
        settings_fail: some setting has a bad value, so that none can be relied on.
    """
    if settings_fail:
        return Section("tuning", "Channels", (skip("not checked: correct the settings first"),))
    chosen = native.tuning_choice(environment)
    if chosen:
        finding = ok(f"NCCL chooses the channels and the protocol of each collective: {chosen} is set")
    else:
        finding = ok(
            "the plugin chooses the channels of a collective by its size: on two to four nodes with one rank each, "
            "and the protocol, too; NCCL chooses on one node"
        )
    return Section("tuning", "Channels", (finding,), {"chosen_by_user": chosen})


def _no_nccl(torch: TorchInstallation | None) -> Finding:
    text = "no NCCL on this machine: GPU jobs cannot run here"
    if torch is not None and not torch.has_cuda:
        text += f" (torch {torch.version} is a build without CUDA)"
    return fail(
        text,
        "install a CUDA build of torch, which brings NCCL, or NVIDIA's package libnccl2; without a GPU, "
        "`bagua-net-bench` shows what the plugin does",
    )


def _forgetful(release: NcclRelease) -> Finding:
    return warn(
        f"NCCL {release} forgets the plugin when a process destroys its last communicator, and uses its own transport "
        "for new ones",
        "start jobs that do so with `bagua-net run -- CMD`",
    )


def _check(
    library: NcclLibrary, severity: Status, environment: Mapping[str, str], surroundings: Surroundings | None
) -> Finding:
    release = library.release
    owner = "torch's" if library.owner == "torch" else "the system's"
    where = f"{owner}, {library.path}, from {library.origin}"
    if release is None:
        return Finding(
            severity,
            f"the version of NCCL ({where}) cannot be found out: {library.problem or 'its text names none'}",
            "see that the file is a complete libnccl.so.2, or install NCCL again",
        )
    if release.table is None:
        return Finding(severity, f"NCCL {release} ({where}) is not supported", "install NCCL 2.12 or newer")
    if library.problem:
        return Finding(
            severity,
            f"NCCL {release} ({where}) does not load: {library.problem}",
            "install what it lacks, or install NCCL again",
        )
    takes = f"NCCL {release} ({where}) takes table v{release.table}"
    if release.is_newer_than_known:
        return Finding(
            Status.WARN,
            f"NCCL {release} ({where}) is newer than 2.30, the newest that this version of bagua knows",
            f"look for bagua's newest version; NCCL's log (NCCL_DEBUG=INFO) must show that it takes v{release.table}",
        )
    if not release.takes_path and surroundings is not None:
        problem = _name_problem(environment, surroundings)
        if problem:
            return Finding(
                severity,
                f"{takes}, but finds plugins by name only, and {problem}",
                "start the job with `bagua-net run --by-name -- CMD`",
            )
    return ok(takes)


def _name_problem(environment: Mapping[str, str], surroundings: Surroundings) -> str:
    plugin = environment.get("NCCL_NET_PLUGIN", "")
    if "/" in plugin:
        return f"NCCL_NET_PLUGIN={plugin} is a path"
    if not default_name_finds(surroundings.library, list(surroundings.loader_path)):
        return "LD_LIBRARY_PATH does not lead to the plugin"
    return ""
