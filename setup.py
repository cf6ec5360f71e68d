"""What pyproject.toml cannot say: where the project is at home, which whoever builds a release knows (PROJECT_URL)."""

import os

from setuptools import setup

home = os.environ.get("PROJECT_URL")
pages = {"Source": "", "Issues": "/issues", "Changes": "/blob/main/CHANGELOG.md"}
setup(project_urls={name: home + page for name, page in pages.items()} if home else {})
