"""Scenarios: the only room that knows the kind of data, of model and of loss.

`settings.py` has what recipes and reports know about a scenario, `base.py` has the protocol;
`classify`, `clip`, `text` and `module` come with the package. A scenario may import the rooms
`vision` and `text` and every room below them; code outside this room does not depend on the kind
of scenario. To add one, see `base.py`.
"""
