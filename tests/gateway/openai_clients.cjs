// Talks to a gateway with clients from npm; prints what each request gave, as JSON. NEKRO_KEY is the key.
const { OpenAI } = require("openai");
const { ChatOpenAI } = require("@langchain/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateText, streamText } = require("ai");

const [baseURL, picture] = process.argv.slice(2);
const apiKey = process.env.NEKRO_KEY;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const model = "nekro";
const said = (content) => [{ role: "user", content }];
const tools = [{ type: "function", function: { name: "f", parameters: { type: "object", properties: {} } } }];
const complete = (body) => client.chat.completions.create({ model, user: "npm", ...body });
const langchain = (fields) => new ChatOpenAI({ model, apiKey, configuration: { baseURL }, maxRetries: 0, user: "lc", ...fields });
const sdk = createOpenAICompatible({ name: "nekro", baseURL, apiKey })(model);

async function joined(stream, textOf) {
  let text = "";
  for await (const part of stream) text += textOf(part) ?? "";
  return text;
}

const requests = {
  models: async () => (await client.models.list()).data.map((one) => one.id),
  plain: async () => (await complete({ messages: said("scene:hello"), tools })).choices[0].message.content,
  streamed: async () =>
    joined(await complete({ messages: said("scene:hello"), stream: true }), (one) => one.choices[0]?.delta.content),
  picture: async () => {
    const parts = [{ type: "text", text: "scene:look" }, { type: "image_url", image_url: { url: picture } }];
    return (await complete({ messages: said(parts), user: "npm-picture" })).choices[0].message.content;
  },
  demanded: () => complete({ messages: said("scene:hello"), tools, tool_choice: "required" }),
  failed: () => complete({ messages: said("scene:fail"), user: "npm-fail" }),
  failed_stream: async () =>
    joined(await complete({ messages: said("scene:fail"), user: "npm-fail", stream: true }), () => ""),
  unknown: () => client.embeddings.create({ model, input: "a" }),
  wrong_key: () => new OpenAI({ baseURL, apiKey: "nk_none", maxRetries: 0 }).models.list(),
  responses: async () => {
    const first = await client.responses.create({ model, input: "scene:hello" });
    const image = { type: "input_image", image_url: picture, detail: "auto" };
    const input = said([{ type: "input_text", text: "scene:look" }, image]);
    const second = await client.responses.create({ model, input, previous_response_id: first.id });
    return [first.output_text, second.output_text];
  },
  responses_streamed: async () =>
    (await client.responses.stream({ model, input: "scene:hello" }).finalResponse()).output_text,
  langchain: async () => (await langchain().bindTools(tools).invoke("scene:hello")).content,
  langchain_streamed: async () => joined(await langchain().stream("scene:hello"), (one) => one.content),
  langchain_responses: async () => (await langchain({ useResponsesApi: true }).invoke("scene:hello")).text,
  ai_sdk: async () => (await generateText({ model: sdk, prompt: "scene:hello", maxRetries: 0 })).text,
  ai_sdk_streamed: async () => joined(streamText({ model: sdk, prompt: "scene:hello" }).textStream, (one) => one),
};

(async () => {
  const answers = {};
  for (const [name, request] of Object.entries(requests)) {
    answers[name] = await request().catch((error) => [error.constructor.name, error.status ?? null, error.message]);
  }
  console.log(JSON.stringify(answers));
})();
