"""What is run of TRL: a tiny model and data made in place, on the ranks and in one process."""

# `train` returns loss and norm of each step, and the parameters.
TRAIN = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, LENGTH = 64, 4
COMMON = dict(
    output_dir="trl", num_train_epochs=1, learning_rate=0.01, max_grad_norm=0.5, logging_steps=1,
    lr_scheduler_type="constant", gradient_checkpointing=False, report_to="none", bf16=False,
    save_strategy="no", disable_tqdm=True, use_cpu=True,
)

def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=None, eos_token_id=1,
    ))

def tokens():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, WORDS))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left",
    )

def texts(*names):
    from datasets import Dataset

    numbers = torch.Generator().manual_seed(1)
    def text(count):
        ids = torch.randint(3, WORDS, (count,), generator=numbers).tolist()
        return " ".join(f"w{i}" for i in ids)
    def of(name, at):  # answers of different lengths
        return text(LENGTH) if name == "prompt" else " " + text(LENGTH + at % 3)
    return Dataset.from_list([{name: of(name, at) for name in names} for at in range(16)])

def short(trainer):
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [entry[name] for entry in steps for name in ("loss", "grad_norm")]

def sft(model, each, **more):
    from trl import SFTConfig, SFTTrainer

    return short(SFTTrainer(
        model=model, args=SFTConfig(per_device_train_batch_size=each, **COMMON),
        train_dataset=texts("text"), processing_class=tokens(), **more,
    ))

def dpo(model, each, **more):
    from trl import DPOConfig, DPOTrainer

    more.setdefault("ref_model", llama())
    return short(DPOTrainer(
        model=model, args=DPOConfig(per_device_train_batch_size=each, **COMMON),
        train_dataset=texts("prompt", "chosen", "rejected"), processing_class=tokens(), **more,
    ))

GENERATIONS = 4

def reward(ids):
    return float(len(set(ids))) + sum(ids) / WORDS

def grpo(model, each, **more):
    from trl import GRPOConfig, GRPOTrainer

    seen = []
    def rewards(prompts, completion_ids, **_):
        seen.append([prompts, completion_ids])
        return [reward(ids) for ids in completion_ids]
    losses = short(GRPOTrainer(
        model=model, reward_funcs=rewards, args=GRPOConfig(
            per_device_train_batch_size=each, num_generations=GENERATIONS,
            max_completion_length=6, **COMMON),
        train_dataset=texts("prompt"), processing_class=tokens(), **more,
    ))
    return losses, seen, flat(model).tolist()
"""

# One process on what both ranks have generated: the policy's gradient, a token counted once.
REPLAY = """
import json, sys

def replay(of_ranks):
    model, tokenizer = llama(), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
    for step in zip(*of_ranks):
        optimizer.zero_grad()
        terms, count = [], 0
        for prompts, completions in step:
            scores = torch.tensor([reward(ids) for ids in completions]).view(-1, GENERATIONS)
            off = scores - scores.mean(1, keepdim=True)
            advantages = (off / (scores.std(1, keepdim=True) + 1e-4)).flatten()
            for prompt, ids, advantage in zip(prompts, completions, advantages):
                given = tokenizer(prompt)["input_ids"]
                logits = model(torch.tensor([given + ids])).logits[0, len(given) - 1 : -1]
                chosen = logits.log_softmax(-1)[range(len(ids)), ids]
                terms.append(advantage * chosen.sum())
                count += len(ids)
        (-sum(terms) / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

print(json.dumps(replay(json.load(sys.stdin))))
"""
