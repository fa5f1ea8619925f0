"""The old place of `gradwire.integrations`, for one release."""
