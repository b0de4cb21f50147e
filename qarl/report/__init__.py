"""Pages about runs: one HTML file each, which needs no network and no server."""
