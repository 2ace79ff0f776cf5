"""What a loader reads from that has no items by index: files, tables, object stores.

A *source* (`source`) is samples in groups that are read whole, of known sizes. `open_source` finds
the one for what a user gave; there is the list that a new one is entered in.

    source        the Protocol, and the columns that a group is read into
    open_source   from a path, a URL, a dataset or a table to its source
    urls          fsspec: folders and patterns listed, in words where that fails
    agreed        listed and counted once over all ranks, the same on each
    parquet       row groups of Parquet files; what tables say of them: constants, deletions, names
    folder        a folder, pattern or list of Parquet files; pyarrow's own datasets
    ipc           record batches of Arrow files
    delta         Delta tables, by deltalake
    iceberg       Iceberg tables, by pyiceberg
    tars          samples in tar files, as webdataset writes them
    arrow_dataset  pyarrow's datasets; arrow_columns has what all of Arrow's read with
"""
