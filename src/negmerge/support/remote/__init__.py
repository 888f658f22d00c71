"""Files in stores that fsspec knows, such as `s3://`, `gs://` and `hf://`.

`urls.py` has the text of URLs, `stores.py` asks a store what a URL is, `ranges.py` fetches files,
`scratch.py` keeps them on this machine. fsspec is imported when the first URL is opened.
"""
