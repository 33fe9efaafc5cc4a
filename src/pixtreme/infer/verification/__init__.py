"""Verification: contract suites, image comparison, latency and telemetry, and the records they go into.

A module author observes facts and hands them to the suites; ``docs/writing-a-module.md`` shows how.
"""

from pixtreme.infer.verification.comparison import ComparisonSummary as ComparisonSummary
from pixtreme.infer.verification.comparison import FrameComparison as FrameComparison
from pixtreme.infer.verification.comparison import compare_rgb as compare_rgb
from pixtreme.infer.verification.comparison import summarize_comparisons as summarize_comparisons
from pixtreme.infer.verification.measurement import DriftSummary as DriftSummary
from pixtreme.infer.verification.measurement import EventTimer as EventTimer
from pixtreme.infer.verification.measurement import LatencySummary as LatencySummary
from pixtreme.infer.verification.measurement import MeasurementRun as MeasurementRun
from pixtreme.infer.verification.measurement import NvidiaTelemetrySource as NvidiaTelemetrySource
from pixtreme.infer.verification.measurement import RequestTimer as RequestTimer
from pixtreme.infer.verification.measurement import TelemetrySample as TelemetrySample
from pixtreme.infer.verification.measurement import TelemetrySource as TelemetrySource
from pixtreme.infer.verification.measurement import TelemetryTrace as TelemetryTrace
from pixtreme.infer.verification.measurement import TimedRequest as TimedRequest
from pixtreme.infer.verification.measurement import WallTimer as WallTimer
from pixtreme.infer.verification.measurement import calculate_throughput as calculate_throughput
from pixtreme.infer.verification.measurement import evaluate_drift as evaluate_drift
from pixtreme.infer.verification.measurement import measure_requests as measure_requests
from pixtreme.infer.verification.measurement import summarize_latency as summarize_latency
from pixtreme.infer.verification.records import CommonRecordFields as CommonRecordFields
from pixtreme.infer.verification.records import JsonReference as JsonReference
from pixtreme.infer.verification.records import canonical_json as canonical_json
from pixtreme.infer.verification.records import canonical_sha256 as canonical_sha256
from pixtreme.infer.verification.records import file_sha256 as file_sha256
from pixtreme.infer.verification.records import load_json_reference as load_json_reference
from pixtreme.infer.verification.records import portable_path as portable_path
from pixtreme.infer.verification.records import validate_common_record as validate_common_record
from pixtreme.infer.verification.suites import AllocationFacts as AllocationFacts
from pixtreme.infer.verification.suites import AllocationIdentity as AllocationIdentity
from pixtreme.infer.verification.suites import CheckResult as CheckResult
from pixtreme.infer.verification.suites import CheckStatus as CheckStatus
from pixtreme.infer.verification.suites import ClosedInferenceFacts as ClosedInferenceFacts
from pixtreme.infer.verification.suites import CommonContractCases as CommonContractCases
from pixtreme.infer.verification.suites import CudaGraphContractSuite as CudaGraphContractSuite
from pixtreme.infer.verification.suites import EngineBindingFacts as EngineBindingFacts
from pixtreme.infer.verification.suites import EngineRoundTripFacts as EngineRoundTripFacts
from pixtreme.infer.verification.suites import FactoryContractCases as FactoryContractCases
from pixtreme.infer.verification.suites import FrameBoundaryFacts as FrameBoundaryFacts
from pixtreme.infer.verification.suites import GpuArrayFacts as GpuArrayFacts
from pixtreme.infer.verification.suites import IsolationFacts as IsolationFacts
from pixtreme.infer.verification.suites import OpenedContractFacts as OpenedContractFacts
from pixtreme.infer.verification.suites import QueryAllocationFacts as QueryAllocationFacts
from pixtreme.infer.verification.suites import RejectionFacts as RejectionFacts
from pixtreme.infer.verification.suites import ResourceSnapshot as ResourceSnapshot
from pixtreme.infer.verification.suites import SequenceFacts as SequenceFacts
from pixtreme.infer.verification.suites import StatelessContractSuite as StatelessContractSuite
from pixtreme.infer.verification.suites import StateLifecycleFacts as StateLifecycleFacts
from pixtreme.infer.verification.suites import TemporalContractSuite as TemporalContractSuite
from pixtreme.infer.verification.suites import VerificationExecutionError as VerificationExecutionError
from pixtreme.infer.verification.suites import VerificationFinding as VerificationFinding
from pixtreme.infer.verification.suites import VerificationInputError as VerificationInputError
from pixtreme.infer.verification.suites import VerificationReport as VerificationReport
from pixtreme.infer.verification.suites import verify_cuda_graph_contract as verify_cuda_graph_contract
from pixtreme.infer.verification.suites import verify_module_contract as verify_module_contract

__all__ = (
    "AllocationFacts",
    "AllocationIdentity",
    "CheckResult",
    "CheckStatus",
    "ClosedInferenceFacts",
    "CommonContractCases",
    "CommonRecordFields",
    "ComparisonSummary",
    "CudaGraphContractSuite",
    "DriftSummary",
    "EngineBindingFacts",
    "EngineRoundTripFacts",
    "EventTimer",
    "FactoryContractCases",
    "FrameBoundaryFacts",
    "FrameComparison",
    "GpuArrayFacts",
    "IsolationFacts",
    "JsonReference",
    "LatencySummary",
    "MeasurementRun",
    "NvidiaTelemetrySource",
    "OpenedContractFacts",
    "QueryAllocationFacts",
    "RejectionFacts",
    "RequestTimer",
    "ResourceSnapshot",
    "SequenceFacts",
    "StateLifecycleFacts",
    "StatelessContractSuite",
    "TelemetrySample",
    "TelemetrySource",
    "TelemetryTrace",
    "TemporalContractSuite",
    "TimedRequest",
    "VerificationExecutionError",
    "VerificationFinding",
    "VerificationInputError",
    "VerificationReport",
    "WallTimer",
    "calculate_throughput",
    "canonical_json",
    "canonical_sha256",
    "compare_rgb",
    "evaluate_drift",
    "file_sha256",
    "load_json_reference",
    "measure_requests",
    "portable_path",
    "summarize_comparisons",
    "summarize_latency",
    "validate_common_record",
    "verify_cuda_graph_contract",
    "verify_module_contract",
)
