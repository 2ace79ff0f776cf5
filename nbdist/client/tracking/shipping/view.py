"""Prepare the page MLflow's UI opens with: the right charts and columns instead of none.

MLflow 3 reads a shared view from an experiment's tag `mlflow.sharedViewState.<key>`: the state of
its page as "deflate;" + base64(zlib(JSON)). It is not documented; tests/tracking/test_view.py opens
it in a browser, and an MLflow that does not know it shows its usual page. Tried with 3.17.
"""

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nbdist.client.tracking.flat import MEASURED_BY_DEVICE
from nbdist.client.tracking.names import metric_name, rank_metric
from nbdist.client.tracking.series import MOST_RANK_SERIES

KEY = "nbdist"
TAG = f"mlflow.sharedViewState.{KEY}"
MOST_CHARACTERS = 5000  # the least of the limits that MLflow's stores have for a tag
_MOST_USER_CHARTS = 8
_MOST_COLUMNS = 6
_SECTIONS = {"summary": "Summary", "logged": "Logged", "ranks": "Per rank"}
_ALL_RUNS = ("loss", "samples_per_s", "comm_pct")
_WAITING = ("skew_ms", "wait_pct")
_SHOWN_BY_RANK = ("comm_ms", "wait_ms", "step_ms", "loss", "data_ms")
# In a window of 1,400 px, of which MLflow's own side bars take up to half.
_CHARTS_A_ROW, _CHART_PX = 2, 300


def page(experiment_id: str) -> str:
    """Return the part of the UI's address that opens an experiment's prepared view.

    Without `workflowType`, MLflow 3 shows the page for traces of language models.
    """
    return (
        f"/#/experiments/{experiment_id}/runs?viewStateShareKey={KEY}"
        "&compareRunsMode=CHART&workflowType=machine_learning"
    )


def rank_pages(run_id: str, experiment_id: str, keys: Collection[str]) -> dict[str, str]:
    """Return the parts of the UI's address that draw a run's ranks in one chart, by quantity.

    A run's own page draws a chart of each metric, and nothing that a server keeps changes that.

    Args:
        run_id: MLflow's.
        experiment_id: MLflow's.
        keys: The metrics of the run.
    """
    pages = {}
    for quantity in _SHOWN_BY_RANK:
        series = [key for key in sorted(keys) if key.startswith(f"rank_{quantity}/")]
        drawn = [key for key in series if not key.endswith("/argmax")]
        if len(drawn) > 1:
            # MLflow 3.17 reads this address only where it begins with the runs.
            asked = {
                "runs": [run_id],
                "metric": drawn[0],
                "experiments": [experiment_id],
                "plot_metric_keys": drawn,
            }
            texts = {key: json.dumps(value, separators=(",", ":")) for key, value in asked.items()}
            # Braces stand for ids that are not known yet.
            query = "&".join(f"{key}={quote(text, safe='{}')}" for key, text in texts.items())
            pages[quantity] = f"/#/metric?{query}&x_axis=step&workflowType=machine_learning"
    return pages


def view_state(summaries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the page's state for an experiment with these runs (`spool` summaries).

    The last numbers of devices have no charts where the state would be too long for a tag.
    A study's runs stand beside all others, for those of a folded one are in no chart, and which are
    unfolded is no part of a shared view in MLflow 3.17. Sorted by "Created" they are nested.
    """
    ranks: set[int] = set()
    user_keys: dict[str, None] = {}
    params: dict[str, None] = {}
    for summary in summaries:
        ranks |= set(summary.get("ranks", ()))
        user_keys |= dict.fromkeys(summary.get("user_keys", ()))
        params |= dict.fromkeys(metric_name(key) for key in summary.get("params", ()))
    of_devices = list(MEASURED_BY_DEVICE) if len(ranks) <= MOST_RANK_SERIES else []
    while True:
        by_rank = (*_SHOWN_BY_RANK, *of_devices)
        state = _state(sorted(ranks), sorted(user_keys), list(params), by_rank)
        if not of_devices or len(encode(state)) < MOST_CHARACTERS:
            return state
        of_devices.pop()


def _state(
    ranks: Sequence[int], user_keys: Sequence[str], params: Sequence[str], by_rank: Sequence[str]
) -> dict[str, Any]:
    """Return the state with charts of these quantities of each rank."""
    charts = [_chart("summary", [key]) for key in _ALL_RUNS]
    charts += [_chart("logged", [key]) for key in user_keys[:_MOST_USER_CHARTS]]
    charts += [_chart("summary", [key]) for key in _WAITING]
    charts += [_ranks_chart(quantity, ranks) for quantity in by_rank]
    # MLflow adds a chart of each metric that leads none, as ranks beside the first one do.
    lead = {chart["metricKey"] for chart in charts}
    beside = {key for chart in charts for key in chart["selectedMetricKeys"]} - lead
    charts += [_chart("ranks", [key]) | {"deleted": True} for key in sorted(beside)]
    columns = [f"metrics.`{key}`" for key in (*_ALL_RUNS, *user_keys[:_MOST_COLUMNS])]
    columns += [f"params.`{key}`" for key in ("layout", "world_size", *params)][:_MOST_COLUMNS]
    return {
        "searchFilter": "",
        # One notebook is one source, so newest first. By the date MLflow would fold what is nested.
        "orderByKey": "tags.`mlflow.source.name`",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": ["attributes.`Source`", *columns],
        "columnOrder": [],
        "columnWidths": {},
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "FIRST_10_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": [
            {
                "uuid": uuid,
                "name": name,
                "display": True,
                "isReordered": False,
                "deleted": False,
                "isGenerated": False,
                "columns": _CHARTS_A_ROW,
                "cardHeight": _CHART_PX,
            }
            for uuid, name in _SECTIONS.items()
            if any(chart["metricSectionId"] == uuid for chart in charts)
        ],
        "viewMaximized": False,
        "runListHidden": True,  # legends name the runs; a button beside the charts opens it
        "isAccordionReordered": True,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {
            "xAxisKey": "step",
            "lineSmoothness": 0,
            "selectedXAxisMetricKey": "",
        },
    }


def encode(state: Mapping[str, Any]) -> str:
    """Return `state` as the tag's value."""
    raw = json.dumps(state, separators=(",", ":")).encode()
    return "deflate;" + base64.b64encode(zlib.compress(raw, 9)).decode()


def _rank_keys(quantity: str, ranks: Sequence[int]) -> list[str]:
    if len(ranks) > MOST_RANK_SERIES:
        return [f"rank_{quantity}/{part}" for part in ("min", "median", "max")]
    return [rank_metric(quantity, rank) for rank in ranks] or [rank_metric(quantity, 0)]


def _ranks_chart(quantity: str, ranks: Sequence[int]) -> dict[str, Any]:
    whose = "each rank" if len(ranks) <= MOST_RANK_SERIES else "the ranks"
    # MLflow titles a chart of several metrics "a vs b vs ...", but those that it makes of nodes.
    title = {"displayName": f"{quantity} of {whose}", "nodeLevelSystemMetricConfiguration": {}}
    return _chart("ranks", _rank_keys(quantity, ranks)) | title


def _chart(section: str, keys: list[str]) -> dict[str, Any]:
    return {
        "uuid": keys[0],
        "type": "LINE",
        "runsCountToCompare": 10,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "displayName": "",
        "metricKey": keys[0],
        "selectedMetricKeys": keys,
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
