"""Every key a run can have, with its default and its meaning.

Invariant: a key that is here is read somewhere, and a key that is not here is an error with the nearest known one.
Docstrings beneath the fields are printed by ``echo2 train --print-config``. Units end names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from echo2.config.objectives import OBJECTIVE_KEYS

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sigma = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
"""Of a log-normal distribution; beyond it draws leave what a number can hold."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def settled(self, key: str) -> Any:
        """The value that ``key`` has in this run, also where it was left open."""
        return getattr(self, key)


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class RunSection(Section):
    name: Name = "run"
    """Name of the run; its folder is `dir`/`name`."""
    dir: str = "runs"
    """Folder that holds run folders, relative to the working directory."""
    seed: NonNegative = 0
    """Seed of prompts, sampling and initial weights."""
    steps: Positive = 100
    """Training steps to run; a step holds `learning.updates_per_step` optimizer updates."""
    mode: Literal["echo2", "sync", "async"] = "echo2"
    """`echo2` uses `staleness`; `sync` generates, then trains (S = 0, kappa = 1); `async` is one step behind (S = 1,
    kappa = 1)."""


class ModelSection(Section):
    path: str = ""
    """A model directory, a hub id, `package:NAME` (a GGUF file inside an installed Python package) or `tiny:qwen3`
    (a small model made on the spot). A relative directory is relative to the file it stands in."""
    snapshot_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Element type of published snapshots and of the workers' weights."""
    warm_start_steps: NonNegative = 0
    """Supervised steps on the tasks' gold replies before version 0; for models that know nothing yet."""
    warm_start_lr: PositiveFloat = 1e-3
    """Learning rate of the warm start."""


class TaskSection(Section):
    name: str
    """A registered task name or `module:Class`."""
    label: Name | Literal[""] = ""
    """What the task is called in this run, in metrics and prompts; empty means its name. Tasks of one name, with other
    options, need a label each."""
    weight: PositiveFloat = 1.0
    """Share of prompts drawn from this task, relative to the others."""
    options: dict[str, Any] = {}
    """Keyword arguments of the task; a relative `path` is relative to the file it stands in."""

    @property
    def called(self) -> str:
        """Its name in the run."""
        return self.label or self.name


class RolloutSection(Section):
    rollouts_per_step: Positive = 64
    """R: trajectories (not prompts) a training step consumes; a multiple of `group_size`."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """n: trajectories of one prompt; advantages are normalised inside the group, so at least 2."""
    temperature: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] = 1.0
    """Sampling temperature; log-probs are taken at it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass; below 1 the importance weight is approximate."""
    max_new_tokens: Positive = 256
    """Token limit of one reply; a reply cut there is an outcome and is scored."""
    engine: Literal["transformers", "vllm", "sglang", "parallax", "openai", "scripted"] = "transformers"
    """What generates on the workers: `transformers` inside the worker, or a server that `server` describes (`openai`,
    any OpenAI-style endpoint, can be evaluated and not trained)."""
    concurrent_groups: Positive = 1
    """Groups a worker generates at the same time."""
    episode_timeout_s: PositiveFloat = 600.0
    """Time after which an unfinished episode is reported as a timeout."""
    thinking: bool = False
    """Passed to chat templates that know `enable_thinking`."""


class ServerSection(Section):
    """The inference server of one machine. Workers take it from their own machine (`echo2 worker --server FILE`, or the
    file that ECHO2_SERVER names), never from the coordinator: it says which program is run."""

    url: str = ""
    """Address of a server that runs already, such as http://127.0.0.1:8000; empty: the worker starts one, watches it
    and ends it."""
    model: str = ""
    """Name of the model at `url`; empty: the only one there."""
    key_variable: str = ""
    """Environment variable that holds the API key of `url`; empty for none."""
    command: tuple[str, ...] = ()
    """What starts a server, such as ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"]; empty: the
    engine's own start with the worker's interpreter. Model, name, address and element type are appended."""
    arguments: tuple[str, ...] = ()
    """Further arguments of a server that the worker starts, such as ["--max-model-len", "4096"]; they come last."""
    peers: tuple[str, ...] = ()
    """Addresses of the Parallax network at `url`, through which its nodes are given weights; needs the package
    lattica."""
    start_timeout_s: PositiveFloat = 900.0
    """Time in which a server must be ready, or have taken new weights."""
    request_timeout_s: PositiveFloat = 600.0
    """Time in which a server must have answered for one reply."""


class StalenessSection(Section):
    budget: NonNegative = 3
    """S: largest (learner version - trajectory version) in a batch; mode `echo2` needs at least 3."""
    publish_period: NonNegative = 0
    """kappa: training steps between published snapshots; 0 means S - 1."""


class RehearsalSection(Section):
    """A run whose learner and engine only take time, over real programs, disks and lines: `learning.learner` and
    `rollout.engine` = `scripted`. For trying pools and networks before a model is paid for."""

    train_s: NonNegativeFloat = 0.0
    """Median time of a training step of the scripted learner."""
    train_spread: Sigma = 0.1
    """Log-normal sigma of that time."""
    group_s: NonNegativeFloat = 0.0
    """Median time in which the scripted engine generates a group."""
    group_spread: Sigma = 0.2
    """Log-normal sigma of that time."""
    snapshot_bytes: Annotated[int, Field(gt=0, le=10**15)] = 1_000_000
    """Size of the scripted learner's weights."""
    changed: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the weights that a step of the scripted learner changes."""


class LearningSection(Section):
    learner: Literal["torch", "scripted"] = "torch"
    """What trains; `scripted` takes the time that `rehearsal` says and learns nothing."""
    objective: Literal[
        "grpo", "grpo_paper", "dr_grpo", "dapo", "gspo", "cispo", "decoupled_ppo", "m2po", "gepo", "dppo_tv"
    ] = "grpo"
    """What a step maximises (docs/objectives.md). Keys that say so have a default of each objective's own."""
    lr: PositiveFloat = 1e-6
    """AdamW learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW moment decays."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    updates_per_step: Positive = 2
    """Optimizer updates per training step, over disjoint minibatches of whole groups."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """epsilon_low of the clipped ratio; for `dppo_tv` a difference of probabilities. The objective's own default."""
    clip_high: PositiveFloat | None = None
    """epsilon_high of the clipped ratio, or of the weight (`cispo`); for `dppo_tv` a difference of probabilities. The
    objective's own default."""
    truncation: PositiveFloat | None = None
    """C: largest importance weight; heavier tokens get it, or are dropped (`decoupled_ppo`). The objective's own
    default."""
    second_moment: PositiveFloat | None = None
    """Largest mean squared log-ratio of an update that `m2po` trains on. The objective's own default."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of KL(policy || initial policy); 0 skips the reference pass."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL per token."""
    advantage_scale: Literal["population", "sample", "none"] | None = None
    """Standard deviation that divides group advantages. The objective's own default."""
    advantage_eps: PositiveFloat = 1e-6
    """Added to that standard deviation."""
    overlong: Literal["train", "mask"] | None = None
    """What a reply cut at the token limit contributes: trained on its reward, or no loss. The objective's own
    default."""
    zero_variance: Literal["keep", "drop"] | None = None
    """What tokens of groups whose rewards are all equal do, whose advantages are 0: `keep` counts them in the mean and
    in the KL term, `drop` leaves them out. The objective's own default; `buffer.drop_zero_variance` replaces them."""
    max_age_steps: NonNegative | None = None
    """Tokens sampled more than so many training steps before are left out, whatever the objective; unset: none."""
    audit_rows: Annotated[int, Field(ge=0, le=256)] = 8
    """Rows per step whose log-probs are compared with those of the version they name; costs a pass over them and
    reading a snapshot, which up to three more of are kept on the learner's disk. 0 compares none; replies of the
    scripted engine never are."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens per forward and backward pass; lower it when memory runs out."""
    logits_chunk_tokens: NonNegative = 0
    """Tokens whose full-vocabulary logits exist at one time; 0: as many as fill 64 MiB, on a GPU 512 MiB."""
    activation_checkpointing: bool = False
    """Keep only the inputs of a model's blocks for the backward pass and compute the rest again: less memory, a third
    more work."""
    compile: bool = False
    """Compile a model's blocks with torch.compile: faster steps, after minutes of compiling at the start."""
    compute_dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Type of forward and backward; weights and optimizer stay float32. `float64`: these too, for exact comparisons."""
    ranks: Positive = 1
    """Processes among which this machine's learner splits weights and work, one per GPU; under torchrun its own count
    holds."""
    collective_timeout_s: Annotated[float, Field(ge=1, le=86400)] = 600.0
    """Silence of another rank after which a rank ends; longer than a step, and than loading the model."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: NonNegative = 0
    """CPU threads of the learner; 0 leaves PyTorch's choice."""

    def settled(self, key: str) -> Any:
        """The objective's own where nothing was set; None where it reads none."""
        value = getattr(self, key)
        return OBJECTIVE_KEYS[self.objective].get(key) if value is None else value


class BufferSection(Section):
    order: Literal["oldest", "freshest"] = "oldest"
    """Which admissible groups a batch takes first."""
    drop_zero_variance: bool = False
    """Refuse groups whose rewards are all equal (they carry no signal) as `no_signal`."""
    max_zero_variance_drops: NonNegative = 64
    """Most zero-variance groups refused per batch; further ones stay, so a solved task cannot stall the run."""


class CheckpointSection(Section):
    every_publishes: Positive = 1
    """Checkpoint every so many publishes; above 1 a learner crash may roll published versions back and fork."""
    keep: Positive = 2
    """Complete checkpoints kept on disk."""


class BroadcastSection(Section):
    topology: Literal["chain", "ring", "tree", "star"] = "chain"
    """How snapshots travel: `chain` from worker to worker (a tree while the coordinator's uplink is slower than a
    worker's line); `ring` the same with every byte sent once by the coordinator; `tree`; `star` from the coordinator
    alone."""
    anchor_every: Positive = 8
    """Publishes after which a whole snapshot is encoded again for workers that lack the version before; the others
    take deltas. More often makes a late worker's way shorter, and costs disk and encoding time."""
    relay_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the coordinator's relay; 0 picks a free one and keeps it for the run."""
    advertise: str = ""
    """Host name or address under which workers dial the coordinator's relay; empty means the one they joined by."""


class CoordinatorSection(Section):
    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback TLS is on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 picks a free one and keeps it for the run."""
    advertise: str = ""
    """Host name or address written into the join string; empty means `host`."""
    tls: Literal["auto", "on", "off"] = "auto"
    """`auto`: on unless `host` is loopback."""
    heartbeat_s: PositiveFloat = 2.0
    """Time between heartbeats of a worker."""
    dead_after_s: PositiveFloat = 120.0
    """Silence after which a worker counts as gone and its leases are handed to others."""
    lease_max_s: PositiveFloat = 3600.0
    """Longest life of a lease, heartbeats or not."""
    max_attempts: Positive = 3
    """Attempts at a group whose workers failed, before it closes with what it has."""
    rescored_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the replies to verifiable tasks whose rewards are scored again beside the coordinator; a worker whose
    reward differs is set aside. 0 scores none."""
    logprob_tolerance: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
    """Mean |difference| in nats per token that rounding may make between a worker's log-probs and the learner's; a
    worker beyond it is set aside. 0 sets nobody aside for it."""
    stall_s: PositiveFloat = 600.0
    """Time without any progress after which the watchdog names the starved loop and ends the run."""
    max_submit_bytes: Positive = 64 * 1024 * 1024
    """Largest submission of one group."""
    join_token_ttl_s: PositiveFloat = 7 * 24 * 3600.0
    """Life of a join token."""
    join_token_uses: Positive = 1000
    """Enrolments one join token allows."""


class WorkersSection(Section):
    local: NonNegative = 2
    """Worker processes started on this machine by `echo2 train`."""
    threads: NonNegative = 0
    """CPU threads of each worker that the run starts on this machine; 0 shares the cores among them and the learner. A
    worker that joins from elsewhere takes all cores its process may use, or what `echo2 worker --threads` says."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    shared_device: bool = False
    """The learner's device generates, too, with the learner's own weights: one process generates and trains in turns.
    For one GPU, or a laptop; with `workers.local = 0`, and as a rule `run.mode = "sync"`."""
    usd_per_h: NonNegativeFloat = 0.0
    """Price of one worker, rent and traffic."""
    orphan_after_s: PositiveFloat = 1800.0
    """A worker that has not heard from its coordinator for so long shuts itself down."""


class ProvisioningSection(Section):
    learner_usd_per_h: NonNegativeFloat = 0.0
    """Price of the learner's machine."""
    gamma: Annotated[float, Field(ge=1)] = 1.1
    """Safety factor; T_bcast is taken when the share 1/gamma of active workers installed."""
    budget_usd: NonNegativeFloat = 0.0
    """The run ends when it has cost this much; 0 means no cap."""
    policy: Literal["cheapest", "exact", "random"] = "cheapest"
    """How machines of `pools` are chosen; `random` pays no heed to cost (the paper's NoCost)."""
    rule: Literal["overlapped", "paper"] = "overlapped"
    """What the pool must deliver: by (2'), where workers generate while a snapshot travels, or by the paper's (2)."""
    period_s: PositiveFloat = 60.0
    """Time between decisions about `pools`."""
    sustain: Positive = 3
    """Decision periods that a shortage or an excess must last before anything is changed."""
    cool_down_s: NonNegativeFloat = 180.0
    """No further change so long after one; what was lost is replaced all the same."""
    start_s: PositiveFloat = 600.0
    """A machine whose worker has not joined after so long is given up."""
    max_price_age_s: PositiveFloat = 28800.0
    """A price that was true so long ago is unknown; catalogs are fetched every seven hours."""
    first_machines: Positive = 1
    """Machines held until T_train is known."""


class PoolSection(Section):
    """Machines that the run activates and releases as it needs them; without any, workers are what joins."""

    kind: Literal["local", "standby", "ray", "skypilot"]
    """`local`: worker processes on the coordinator's machine; `standby`: workers that joined by themselves and wait;
    `ray`: actors on a Ray cluster; `skypilot`: machines rented through SkyPilot."""
    offers: str = ""
    """CSV file of what a `local` or `ray` pool has; a relative path is relative to the file it stands in."""
    rollouts_per_s: PositiveFloat = 1.0
    """What a worker on `standby` is expected to deliver before it has delivered anything."""
    options: dict[str, Any] = {}
    """Settings of a `ray` or `skypilot` pool, see docs/pools.md."""


class EvalSection(Section):
    every_steps: NonNegative = 0
    """Score held-out prompts every so many steps; 0 never."""
    prompts: Positive = 64
    """Held-out prompts per evaluation."""
    samples: Positive = 1
    """Replies per held-out prompt."""


class MetricsSection(Section):
    tensorboard: bool = False
    """Also write TensorBoard event files."""
    wandb_project: str = ""
    """Also log to this Weights & Biases project; empty means no."""
    transcripts_per_step: NonNegative = 2
    """Trajectories per step kept readable in `transcripts.jsonl` and in the report."""
