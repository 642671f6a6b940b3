"""The formats of recorded traffic that are read, each in a module of its name, and which one a file has."""

from itertools import islice
from pathlib import Path

from tokenyard.base import ConfigError
from tokenyard.sim.traces.azure import AZURE
from tokenyard.sim.traces.bailian import BAILIAN
from tokenyard.sim.traces.blis import BLIS
from tokenyard.sim.traces.blis_spec import BLIS_SPEC, is_blis_spec
from tokenyard.sim.traces.burstgpt import BURSTGPT
from tokenyard.sim.traces.csv_table import csv_values
from tokenyard.sim.traces.genai_spans import GENAI_SPANS
from tokenyard.sim.traces.kv_cache_tester import KV_CACHE_TESTER
from tokenyard.sim.traces.llmservingsim import LLMSERVINGSIM
from tokenyard.sim.traces.lmcache_agent import LMCACHE_AGENT
from tokenyard.sim.traces.mooncake import MOONCAKE
from tokenyard.sim.traces.mooncake_sessions import MOONCAKE_SESSIONS
from tokenyard.sim.traces.openai_jsonl import OPENAI_JSONL
from tokenyard.sim.traces.prompts import PROMPT_TEXTS, is_array_of_prompts
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.servegen import SERVEGEN
from tokenyard.sim.traces.tokenyard_form import TOKENYARD, TOKENYARD_LOG
from tokenyard.sim.traces.tokenyard_log_sessions import TOKENYARD_LOG_SESSIONS
from tokenyard.sim.traces.trace_files import read_lines, read_members
from tokenyard.sim.traces.trace_format import TraceFormat, record_of
from tokenyard.sim.traces.vidur import VIDUR
from tokenyard.sim.traces.vidur_config import VIDUR_CONFIG, is_vidur_config
from tokenyard.sim.traces.vllm_measured import VLLM_MEASURED
from tokenyard.sim.traces.workload import Workload

LINES_CHECKED = 50

FORMATS = (
    *(MOONCAKE_SESSIONS, LLMSERVINGSIM, GENAI_SPANS, BAILIAN, MOONCAKE, AZURE, BURSTGPT, VIDUR, VLLM_MEASURED),
    *(BLIS, BLIS_SPEC, VIDUR_CONFIG),
    *(SERVEGEN, KV_CACHE_TESTER, LMCACHE_AGENT, TOKENYARD_LOG, TOKENYARD_LOG_SESSIONS, TOKENYARD, OPENAI_JSONL),
    PROMPT_TEXTS,
)
"""In the order in which they are tried: one whose lines have the fields of another comes before that one."""
TRACE_FORMATS = {form.name: form for form in FORMATS}


def read_trace(path: Path, trace_format: str, options: ReadOptions | None = None) -> Workload:
    """The workload in `path`. Raises ConfigError, in one line, for an unknown format or a file that does not fit it."""
    if trace_format not in TRACE_FORMATS:
        raise ConfigError(f"there is no --trace-format {trace_format!r}; choose one of {', '.join(TRACE_FORMATS)}")
    options = options or ReadOptions()
    return TRACE_FORMATS[trace_format].read(path, options).limited(options.limit)


def detect_format(path: Path) -> str:
    """The name of the format. Raises ConfigError if the file cannot be read or its first lines fit none."""
    found, array = _of_members(path), False
    if path.suffix in (".yaml", ".yml", ".json") and is_vidur_config(path):
        return VIDUR_CONFIG.name
    if path.suffix in (".yaml", ".yml") and is_blis_spec(path):
        return BLIS_SPEC.name
    if not found and not path.is_dir():
        for place, (where, line) in enumerate(islice(read_lines(path), LINES_CHECKED)):
            array = array or (place == 0 and line.startswith("["))
            found = _of_json(line) if line.lstrip().startswith("{") else ""
            if found or (place == 0 and (found := _of_table(where, line))):
                break
    if not found and array and is_array_of_prompts(line for _, line in islice(read_lines(path), LINES_CHECKED)):
        return PROMPT_TEXTS.name
    if not found and array:
        raise ConfigError(f"{path} is one JSON array; write one object a line instead (jq -c '.[]')")
    if not found:
        raise ConfigError(f"the format of {path} is not clear from its first lines; say which it is by --trace-format")
    return found


def _of_members(path: Path) -> str:
    """The format of a folder or archive, "" for anything else."""
    if not (path.is_dir() or ".tar" in path.suffixes or path.suffix == ".tgz"):
        return ""
    return next((form.name for form in FORMATS if form.members and _holds(path, form)), "")


def _holds(path: Path, form: TraceFormat) -> bool:
    first = next(read_members(path, form.members), None)
    return first is not None and form.has_member(first[1])


def _of_json(line: str) -> str:
    record = record_of(line)
    return next((form.name for form in FORMATS if form.has_fields(record)), "")


def _of_table(where: str, line: str) -> str:
    try:
        header = {value.strip().lower() for value in csv_values(where, line)}
    except ConfigError:
        return ""
    return next((form.name for form in FORMATS if form.has_columns(header)), "")
