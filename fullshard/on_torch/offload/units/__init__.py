"""A unit whose bytes rest away from the device."""
