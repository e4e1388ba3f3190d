"""`draftfleet export`: the folders, and on request one of them on the hub."""

from __future__ import annotations

from draftfleet.errors import SettingsError
from draftfleet.hub import Hub, Place
from draftfleet.settings import Settings
from trainer.export import FORMATS, export
from trainer.export.card import is_of_the_hub
from trainer.export.folder import Manifest


def publish(
    settings: Settings,
    formats: list[str],
    *,
    hub: Place | None = None,
    overwrite: bool = False,
    license: str | None = None,
    which: str = "",
) -> dict[str, str]:
    """Export, and upload the one format that is named. Returns the folders by format, and the upload's address.

    `which` checkpoint: see `trainer.best.choose`. Whether the hub can take it is asked before anything is written.
    Raises what `export` does, and HubError; SettingsError for a target that only this machine has.
    """
    pushing = None
    if hub is not None:
        if len(formats) != 1:
            raise SettingsError(
                f"--push-to-hub {hub.repo}: a repository holds one format; name it with --format: {', '.join(FORMATS)}."
            )
        if not settings.export.target_name and not is_of_the_hub(settings.target.path):
            raise SettingsError(
                f"--push-to-hub {hub.repo}: others do not have target.path = {settings.target.path or '(unset)'}: set "
                "export.target_name to the target's name on the hub."
            )
        pushing = Hub(hub)
        pushing.check(overwrite=overwrite)
    folders = export(settings, formats, license=license, which=which)
    said = {name: str(folder) for name, folder in folders.items()}
    if pushing is not None:
        folder = folders[formats[0]]
        manifest = Manifest.read(folder)
        said["hub"] = pushing.push(folder, f"{manifest.drafter}, step {manifest.step}, for {manifest.format}")
    return said
