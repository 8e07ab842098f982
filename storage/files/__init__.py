"""Files of chats and plugins: live directories, and contents in a store with a manifest in SQL.

``areas`` has the directories of a host. The other modules keep areas without a disk that all hosts share:

- ``stores`` has what a store of objects provides, its two kinds, a directory and a bucket, and the choice of
  one by its URL.
- ``paths`` says which paths an area may hold.
- ``manifest`` has the rows of areas: which content each has at which path, by version. ``content_rows`` has
  those of contents.
- ``contents`` moves contents between a host's ``cache`` and the store.
- ``local_area`` makes a directory from an area, and a change of the area from a directory, which ``scan``
  compares with what is known of it.
- ``expiry`` ends old uploads, and the files of idle shared areas.
- ``collection`` deletes contents that no area has, and checks the others.
"""
