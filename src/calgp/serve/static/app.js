const answer = document.getElementById("answer");
document.getElementById("picture").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  const body = new FormData();
  body.append("images", file);
  const response = await fetch("/v1/predict", { method: "POST", body });
  const told = await response.json();
  if (!response.ok) { answer.textContent = told.detail; return; }
  const { label, confidence, entropy } = told.predictions[0];
  answer.textContent = `${label}, ${(100 * confidence).toFixed(1)} %, entropy ${entropy.toFixed(2)} nats`;
});
