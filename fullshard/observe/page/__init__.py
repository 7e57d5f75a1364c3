"""The local web page: what a plan costs, and how runs go. Reads only; see docs/guides/page.md."""
