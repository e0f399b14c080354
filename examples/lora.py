"""Private fine-tuning of adapters: LoRA on a small Llama with random weights, only the adapters are trained.

    pip install transformers peft
    python examples/lora.py

Frozen weights cost flash clipping nothing: neither norms nor sums are taken of them.
"""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from dpscope.flash import PrivacyEngine

VOCABULARY, LENGTH = 64, 12


def make_model() -> nn.Module:
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))


def make_loader() -> DataLoader:
    """Sequences that count upwards from a random start."""
    starts = torch.randint(VOCABULARY, (128, 1), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset((starts + torch.arange(LENGTH)) % VOCABULARY), batch_size=32)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean over each sequence's tokens first, then over sequences: no sequence's length weighs on another's loss."""
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1).mean()


def main() -> None:
    torch.manual_seed(0)
    model = make_model().train()
    adapters = [p for p in model.parameters() if p.requires_grad]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    privacy_engine = PrivacyEngine()
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(adapters, lr=1e-2),
        data_loader=make_loader(),
        noise_multiplier=0.8,
        max_grad_norm=0.1,
    )
    for _ in range(2):
        for (ids,) in loader:
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()

    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert moved == trained, "the adapters move, all of them, and nothing else"
    print(f"{len(trained)} adapter matrices trained, {len(before) - len(trained)} weights left as they were")
    print(f"ε = {privacy_engine.get_epsilon(delta=1e-5):.2f} at δ = 1e-5")


if __name__ == "__main__":
    main()
