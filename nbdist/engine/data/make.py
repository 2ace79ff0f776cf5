"""Make a loader: `nbdist.loader`. Main thread."""

import functools
import gc
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from nbdist.engine.compat.libraries import hf_datasets
from nbdist.engine.data import alike
from nbdist.engine.data.decode import collate, decoded, in_turn
from nbdist.engine.data.loaders import Loader
from nbdist.engine.data.order.own_sampler import SamplerBatches
from nbdist.engine.data.order.sampler import UNKNOWN, Batches, SourceBatches
from nbdist.engine.data.order.shards import by_rank, data_shard
from nbdist.engine.data.order.stream_batches import StreamBatches
from nbdist.engine.data.order.streams import SampleStream
from nbdist.engine.data.position import resume
from nbdist.engine.data.position.position import LoaderPosition
from nbdist.engine.data.samples import OfStream, Rows, Transformed, as_is
from nbdist.engine.data.sources.open_source import open_source
from nbdist.engine.data.sources.tars import TarSource
from nbdist.engine.kernel import location
from nbdist.shared import side
from nbdist.shared.errors import UsageError
from nbdist.shared.options import BATCH_TIMES, is_whole


def loader(
    dataset: Any,
    *unnamed: Any,
    global_batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    weights: Sequence[float] | str | None = None,
    columns: Sequence[str] | None = None,
    transform: Callable[[Any], Any] | None = None,
    interleave: int = 16,
    window: int = 1000,
    sampler: Any = None,
    decode: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    on_bad: str = "raise",
    **options: Any,
) -> Loader[Any]:
    """Return a DataLoader over this rank's parts of global batches of `dataset`.

    A dataset with items by index is read item by item. Files and tables are read by row groups,
    ahead of the loop, and each group once over all ranks where their number divides `interleave`;
    all ranks make such a loader together. Its batches are dicts: a tensor for each column of
    numbers, `[batch]` or for lists of one length `[batch, length]`, times as int64 nanoseconds;
    lists of str, bytes or tensors otherwise. With `transform` or `collate_fn` samples are dicts.

    Every sample comes exactly once an epoch on exactly one rank. Parts of a batch differ by at most
    one sample: `layout.step` weighs by it, and a plain loop, which averages ranks, may do so by
    `loader.share`. The epoch counts by itself; the order follows from (seed, epoch). `state_dict`
    and `load_state_dict` resume exactly, in the middle of an epoch and on another number of ranks
    too.

    Args:
        dataset: Anything with a length and items by index; a stream (what can be iterated again and
            again, or a function that returns an iterable), which each rank reads whole, in the
            order and to the end that all ranks share; or a folder, pattern or URL of Parquet or
            Arrow files or of WebDataset's tars, or a list of these; a Delta table, its DeltaTable,
            pyiceberg's Table, or a pyarrow.dataset.Dataset.
        unnamed: Nothing; all that follows is given by name.
        global_batch: Samples in a batch over all ranks together. It must be given.
        shuffle: A new order each epoch; False keeps the dataset's order, of files and tables that
            in each of the groups which are mixed.
        seed: Decides the order, and with epoch, batch and rank what workers draw of torch's,
            Python's and numpy's random numbers (in their place `generator=`, by its first seed).
        drop_last: Leave out a last batch that is not full.
        weights: One number a rank (of those that share a batch), such as `[1, 0.5]` where rank 1
            is half as fast: parts are proportional to it, a sample each at least. Gradients must
            be weighed then, by `layout.step` or by `loader.share`. "measured" takes the ranks'
            own pace in their last 50 steps, whatever they trained; it is agreed again when a loop
            begins, which all ranks must do together then. Parts are equal until it is known, and
            where ranks differ by less than a tenth. None shares equally.
        columns: Of files and tables, those to read; None for all.
        transform: Of one sample, before samples are collated; in the workers, where there are
            some. torch's, Python's and numpy's random numbers in it follow from seed, epoch and
            sample alone.
        interleave: Of how many row groups samples are mixed. More mix better, and need more
            memory: a rank holds its share of so many groups, three more, and about three for each
            of 2 to 4 reader threads. A resume reads its share again. 1 keeps files' order.
        window: Of streams: so many samples are read and shuffled at a time.
        sampler: Gives the order of all ranks, of a dataset with items by index, where its length
            and its order in an epoch are the same on each: it is iterated with random numbers of
            (seed, epoch), after its `set_epoch`. `shuffle` does not count then.
        decode: Of tars: decode files by their endings, as `webdataset` does by default, images to
            PIL's. Pickles, and endings that are not known, stay bytes.
        storage_options: For the filesystem behind a URL, as fsspec takes them.
        on_bad: What becomes of a sample that raises: "raise" ends the cell with a DataError that
            names it; "skip" leaves it out, and counts it (`Loader.skipped`). The order, and where
            batches end, stay as they are on all ranks: the rank's part is smaller, and where
            nothing is left of it, one sample of another rank's part stands in.
        options: The other options of `torch.utils.data.DataLoader`.

    Raises:
        UsageError: A dataset without length or index, fewer samples than ranks, weights that do
            not fit, an option that is unknown or says how batches are made, a value that makes no
            sense, or a column that is not there; or this is the notebook.
        DataError: Files that are not there, cannot be read, or differ in their columns.
    """
    side.require_rank("nbdist.loader")
    # Options of torch's DataLoader that say how batches are made: ours to say.
    if "batch_sampler" in options:
        raise UsageError(
            "nbdist.loader takes no batch_sampler.",
            why="the order follows from seed and epoch, and each rank takes its part by itself; "
            "a sampler of single samples may give the order of all ranks",
            do="leave it out; give global_batch",
        )
    if "batch_size" in options:
        raise _no_global_batch("nbdist.loader takes no batch_size.", options["batch_size"])
    if unnamed or global_batch is None:
        what = "nbdist.loader takes the samples of a batch over all ranks, by name."
        raise _no_global_batch(what, unnamed[0] if unnamed else None)
    if times := os.environ.get(BATCH_TIMES):
        global_batch *= int(times)
    _check_words(seed, window, transform, options)
    if on_bad not in ("raise", "skip"):
        raise UsageError(f'on_bad is "raise" or "skip", not {on_bad!r}.')
    if not options.get("in_order", True):
        raise UsageError(
            "nbdist.loader takes no in_order=False.",
            why="a position counts the batches before it, and so they come in order",
            do="leave it out",
        )
    how: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    source = open_source(dataset, columns, storage_options)
    if source is None:
        _refuse_options_of_sources(columns, storage_options)
    batches: Batches
    if source is None and is_stream(dataset):
        _refuse_sampler(sampler)
        size = window if shuffle else global_batch
        stream = SampleStream(hf_datasets.whole(dataset), shuffle, seed, size)
        batches = StreamBatches(stream, global_batch, drop_last)
        dataset = OfStream(transform)
    elif source is None:
        _refuse_what_has_no_index(dataset)
        if sampler is None:
            batches = Batches(len(dataset), global_batch, **how)
        else:
            batches = SamplerBatches(sampler, global_batch, seed, drop_last)
        batches.alike |= alike.digests(dataset)
        if transform is not None:
            dataset = Transformed(dataset, transform)
    else:
        _refuse_sampler(sampler)
        _check_interleave(interleave)
        batches = SourceBatches(source, global_batch, interleave, **how)
        if isinstance(source, TarSource):
            transform = in_turn(decoded, transform) if decode else transform
            options.setdefault("collate_fn", collate)
        is_by_sample = transform is not None or options.get("collate_fn") is not None
        dataset = Rows(batches.samples, transform, is_by_sample)
        if not is_by_sample:
            options["collate_fn"] = as_is
        if options.get("timeout"):
            batches.timeout_s = float(options["timeout"])
            options["timeout"] = options["timeout"] if options.get("num_workers") else 0
    if dist.is_initialized() and data_shard() != by_rank():
        gc.collect()  # a layout that only a reference cycle keeps says nothing of what comes
    _check_sizes(batches.samples, global_batch, drop_last)
    batches.skips = on_bad == "skip"
    made_at = _calling_line()
    standing = LoaderPosition(batches, resume.here.cell_number(), made_at[0])
    made = Loader(dataset, standing, options, made_at)
    made.weights = weights
    resume.here.add(standing)
    return made


def is_stream(dataset: Any) -> bool:
    """Return whether this can be iterated again and again, and has no items by index."""
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return False
    if not hasattr(dataset, "__iter__"):
        return inspect.isroutine(dataset) or isinstance(dataset, functools.partial)
    if iter(dataset) is dataset:
        raise UsageError(
            f"This {type(dataset).__name__} can be iterated once.",
            why="each epoch begins at the start, and so does a training that goes on",
            do="give the function that makes it, without calling it: nbdist.loader(make, ...)",
        )
    return True


def _refuse_what_has_no_index(dataset: Any) -> None:
    if _is_by_column(dataset):
        raise UsageError(
            f"nbdist.loader cannot read samples from this {type(dataset).__name__}.",
            why="its items by index or name are columns, and samples are rows",
            do="write it as Parquet and give the path, or make a dataset of it, such as "
            "datasets.Dataset.from_pandas(frame) or torch.utils.data.TensorDataset",
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"nbdist.loader cannot read this {type(dataset).__name__}.",
            why="it has neither a length and items by index, nor can it be iterated",
            do="give a Dataset, a list, a path, a table, an iterable or a function that makes one",
        )


def _is_by_column(dataset: Any) -> bool:
    """Return whether items are columns: a data frame, an Arrow table, a dict by name."""
    if isinstance(dataset, dict):
        return set(dataset) != set(range(len(dataset)))
    package, _, _ = type(dataset).__module__.partition(".")
    return package in ("pandas", "polars", "pyarrow") and hasattr(dataset, "columns")


def _refuse_sampler(sampler: Any) -> None:
    if sampler is not None:
        raise UsageError(
            "sampler= is for datasets with items by index.",
            why="streams are read as they come, files and tables by groups of samples",
            do="leave it out; shuffle= and interleave= say how samples are mixed",
        )


def _refuse_options_of_sources(columns: Any, storage_options: Any) -> None:
    for name, value in (("columns", columns), ("storage_options", storage_options)):
        if value is not None:
            raise UsageError(
                f"{name}= is for files and tables.", do="leave it out, or give a path or a table"
            )


def _check_words(seed: int, window: int, transform: Any, options: Mapping[str, Any]) -> None:
    unknown = options.keys() - _OF_DATALOADER
    if unknown:
        raise UsageError(
            f"nbdist.loader takes no {', '.join(sorted(unknown))}.",
            why="neither does torch's DataLoader, which gets its other options",
            do="help(nbdist.loader) has those of nbdist",
        )
    for name, value, least in (("seed", seed, -_LARGEST), ("window", window, 1)):
        if not is_whole(value, least):
            raise UsageError(f"{name}={value!r} is no whole number{' above 0' * (least > 0)}.")
    if not is_whole(options.get("num_workers", 0)):
        raise UsageError(f"num_workers={options['num_workers']!r} is no number of processes.")
    if transform is not None and not callable(transform):
        raise UsageError(f"transform={transform!r} is no function of a sample.")


_OF_DATALOADER = inspect.signature(DataLoader.__init__).parameters.keys()
_LARGEST = 2**63


def _check_interleave(interleave: int) -> None:
    if isinstance(interleave, bool) or not isinstance(interleave, int) or interleave < 1:
        raise UsageError(
            f"interleave={interleave!r} is no number of row groups.",
            do="use a whole number, best one that the number of ranks divides, such as 16",
        )


def _no_global_batch(what: str, per_rank: object) -> UsageError:
    """Return the error for a batch that is not given as the global one.

    Args:
        what: What was done.
        per_rank: The number that was given instead, as DataLoader takes it, if it is one.
    """
    size = per_rank if is_whole(per_rank, 1) else 32
    whole = size * data_shard().count
    return UsageError(
        what,
        why=f"global_batch= is of all ranks together: {whole:,} here for {size:,} per rank",
        do=f"nbdist.loader(dataset, global_batch={whole})",
    )


def _check_sizes(samples: int, global_batch: int, drop_last: bool) -> None:
    ranks = data_shard().count
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < ranks:
        raise UsageError(
            f"global_batch={global_batch!r} gives {ranks} ranks nothing to share.",
            why="it counts the samples of a batch over all ranks, and each needs at least one",
            do=f"use a whole number of {ranks} or more, best a multiple of {ranks}",
        )
    if samples == UNKNOWN:
        return
    if samples < ranks or (drop_last and samples < global_batch):
        noun = "sample" if samples == 1 else "samples"
        raise UsageError(
            f"The dataset has {samples} {noun}: too few for {ranks} ranks and a global batch of "
            f"{global_batch}.",
            do="use more samples, fewer ranks, or a smaller batch",
        )


def _calling_line() -> tuple[int, int]:
    """Return the prompt and the line of the cell that makes a loader; zeros outside of cells."""
    place = location.here.cell_place(sys._getframe())
    return (0, 0) if place is None else (location.here.prompt_of(place[0]), place[1])
