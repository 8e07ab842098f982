BEGIN TRANSACTION;
CREATE TABLE adapter_clients (
	id TEXT NOT NULL, 
	adapter_key TEXT NOT NULL, 
	platform TEXT NOT NULL, 
	name TEXT NOT NULL, 
	version TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	seen_at DATETIME NOT NULL, 
	owner TEXT, 
	lease_until DATETIME, 
	fence BIGINT NOT NULL, 
	CONSTRAINT pk_adapter_clients PRIMARY KEY (id)
);
INSERT INTO "adapter_clients" VALUES('adapter_clients-1','onebot_v11','platform of adapter_clients','Nomen 😀','version of adapter_clients','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','owner of adapter_clients','2026-03-01 12:30:15.250000',7);
CREATE TABLE adapter_sends (
	sequence INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id TEXT NOT NULL, 
	adapter_key TEXT NOT NULL, 
	channel_id TEXT NOT NULL, 
	event TEXT NOT NULL, 
	message_id TEXT, 
	data TEXT, 
	state TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	client_id TEXT, 
	client_fence BIGINT, 
	due_at DATETIME NOT NULL, 
	expires_at DATETIME, 
	answer TEXT, 
	error TEXT, 
	created_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	CONSTRAINT uq_adapter_sends_id UNIQUE (id)
);
INSERT INTO "adapter_sends" VALUES(1,'adapter_sends-1','onebot_v11','group_1','event of adapter_sends','messages-1','{"a":[1,"b",null]}','waiting',7,'adapter_clients-1',7,'2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','{"a":[1,"b",null]}','error of adapter_sends','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000');
CREATE TABLE adapter_subscriptions (
	client_id TEXT NOT NULL, 
	channel_id TEXT NOT NULL, 
	CONSTRAINT pk_adapter_subscriptions PRIMARY KEY (client_id, channel_id), 
	CONSTRAINT fk_adapter_subscriptions_client_id FOREIGN KEY(client_id) REFERENCES adapter_clients (id) ON DELETE CASCADE
);
INSERT INTO "adapter_subscriptions" VALUES('adapter_clients-1','group_1');
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0028');
CREATE TABLE api_keys (
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	digest BLOB NOT NULL, 
	scopes TEXT NOT NULL, 
	chats TEXT NOT NULL, 
	user_id TEXT, 
	requests_per_minute INTEGER, 
	cost_per_day DOUBLE, 
	tokens_per_day BIGINT, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME, 
	revoked_at DATETIME, stored_bytes BIGINT DEFAULT 0 NOT NULL, stored_bytes_limit BIGINT, 
	CONSTRAINT pk_api_keys PRIMARY KEY (id)
);
INSERT INTO "api_keys" VALUES('api_keys-1','Nomen 😀',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F','["post","read"]','*','user-1',7,0.125,7,'2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000',7,7);
CREATE TABLE approvals (
	sequence INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id TEXT NOT NULL, 
	call_id TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	turn_id TEXT, 
	round_id TEXT, 
	root_turn_id TEXT, 
	user_id TEXT, 
	method TEXT NOT NULL, 
	lane TEXT NOT NULL, 
	arguments TEXT NOT NULL, 
	edited_arguments TEXT, 
	digest TEXT NOT NULL, 
	requested_at DATETIME NOT NULL, 
	expires_at DATETIME NOT NULL, 
	state TEXT NOT NULL, 
	scope TEXT, 
	grant_until DATETIME, 
	revoked_at DATETIME, 
	decided_by TEXT, 
	decided_at DATETIME, 
	reason TEXT, 
	seal TEXT, 
	CONSTRAINT fk_approvals_chat_key_chats FOREIGN KEY(chat_key) REFERENCES chats (chat_key) ON DELETE CASCADE, 
	CONSTRAINT uq_approvals_id UNIQUE (id), 
	CONSTRAINT uq_approvals_call_id UNIQUE (call_id)
);
INSERT INTO "approvals" VALUES(1,'approvals-1','calls-1','chat-1','rounds-1','rounds-1','rounds-1','user-1','author.plugin.pay','methods','[]',NULL,'digest of approvals','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','pending','once','2026-03-01 12:30:15.250000',NULL,'decided_by of approvals','2026-03-01 12:30:15.250000','reason of approvals','seal of approvals');
CREATE TABLE audit (
	sequence INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at DATETIME NOT NULL, 
	key_id TEXT, 
	action TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	data TEXT, 
	request_id TEXT
);
INSERT INTO "audit" VALUES(1,'2026-03-01 12:30:15.250000','api_keys-1','key.create','subject of audit','{"a":[1,"b",null]}','request_id of audit');
CREATE TABLE calls (
	id TEXT NOT NULL, 
	method TEXT NOT NULL, 
	type TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	round_id TEXT, 
	lane TEXT, 
	state TEXT NOT NULL, 
	repeatable BOOLEAN NOT NULL, 
	fence BIGINT NOT NULL, 
	worker TEXT, 
	lease_until DATETIME, 
	requested_at DATETIME NOT NULL, 
	published_at DATETIME, 
	deadline DATETIME, 
	detached_at DATETIME, 
	started_at DATETIME, 
	finished_at DATETIME, 
	invocation TEXT, 
	outcome TEXT, 
	error_type TEXT, 
	error_message TEXT, 
	CONSTRAINT pk_calls PRIMARY KEY (id)
);
INSERT INTO "calls" VALUES('calls-1','author.plugin.pay','tool','chat-1','rounds-1','methods','done',1,7,'worker of calls','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','{"a":[1,"b",null]}','{"a":[1,"b",null]}','error_type of calls','error_message of calls');
CREATE TABLE chat_events (
	chat_key TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	type TEXT NOT NULL, 
	turn_id TEXT, 
	round_id TEXT, 
	call_id TEXT, 
	message_id TEXT, 
	data TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_chat_events PRIMARY KEY (chat_key, number)
);
INSERT INTO "chat_events" VALUES('chat-1',7,'message.received','rounds-1','rounds-1','calls-1','messages-1','{"a":[1,"b",null]}','2026-03-01 12:30:15.250000');
CREATE TABLE chat_summaries (
	chat_key TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	up_to BIGINT NOT NULL, 
	oldest_at DATETIME NOT NULL, 
	newest_at DATETIME NOT NULL, 
	text TEXT NOT NULL, 
	group_name TEXT NOT NULL, 
	model TEXT NOT NULL, 
	prompt_tokens INTEGER, 
	answer_tokens INTEGER, 
	cost DOUBLE NOT NULL, 
	created_at DATETIME NOT NULL, tokens_estimated BOOLEAN DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_chat_summaries PRIMARY KEY (chat_key, version), 
	CONSTRAINT fk_chat_summaries_chat_key_chats FOREIGN KEY(chat_key) REFERENCES chats (chat_key) ON DELETE CASCADE
);
INSERT INTO "chat_summaries" VALUES('chat-1',7,7,'2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','text of chat_summaries','default','model of chat_summaries',7,7,0.125,'2026-03-01 12:30:15.250000',1);
CREATE TABLE chats (
	chat_key TEXT NOT NULL, 
	container_key TEXT NOT NULL, 
	adapter_key TEXT, 
	channel_id TEXT, 
	channel_name TEXT, 
	channel_type TEXT, 
	created_at DATETIME NOT NULL, 
	history_after BIGINT NOT NULL, 
	owner TEXT, 
	lease_until DATETIME, 
	fence BIGINT NOT NULL, 
	shared_used_at DATETIME, reset_at DATETIME, preset_id BIGINT, is_active BOOLEAN DEFAULT 1 NOT NULL, observe_mode BOOLEAN DEFAULT 0 NOT NULL, history_revision BIGINT DEFAULT 0 NOT NULL, last_event BIGINT DEFAULT 0 NOT NULL, model_group TEXT, active_at DATETIME, title TEXT, 
	CONSTRAINT pk_chats PRIMARY KEY (chat_key), 
	CONSTRAINT uq_chats_container_key UNIQUE (container_key)
);
INSERT INTO "chats" VALUES('chat-1','box-1','onebot_v11','group_1','channel_name of chats','channel_type of chats','2026-03-01 12:30:15.250000',0,'owner of chats','2026-03-01 12:30:15.250000',7,'2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000',1,1,1,7,1,'default','2026-03-01 12:30:15.250000','title of chats');
CREATE TABLE cron_jobs (
	job_id TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	cron_expr TEXT NOT NULL, 
	timezone TEXT NOT NULL, 
	workday_mode TEXT NOT NULL, 
	title TEXT, 
	event_desc TEXT NOT NULL, 
	next_fire_at DATETIME, 
	last_fired_at DATETIME, 
	created_at DATETIME NOT NULL, 
	updated_at DATETIME NOT NULL, 
	CONSTRAINT pk_cron_jobs PRIMARY KEY (job_id), 
	CONSTRAINT fk_cron_jobs_chat_key FOREIGN KEY(chat_key) REFERENCES chats (chat_key) ON DELETE CASCADE
);
INSERT INTO "cron_jobs" VALUES('cron_jobs-1','chat-1','0 9 * * *','Europe/Berlin','none','title of cron_jobs','event_desc of cron_jobs','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000');
CREATE TABLE downloads (
	digest BLOB NOT NULL, 
	target TEXT NOT NULL, 
	request TEXT NOT NULL, 
	done_bytes BIGINT NOT NULL, 
	whole_bytes BIGINT, 
	report TEXT, 
	updated_at DATETIME NOT NULL, 
	owner TEXT, 
	lease_until DATETIME, 
	fence BIGINT NOT NULL, 
	CONSTRAINT pk_downloads PRIMARY KEY (digest)
);
INSERT INTO "downloads" VALUES(X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F','target of downloads','request of downloads',7,7,'{"a":[1,"b",null]}','2026-03-01 12:30:15.250000','owner of downloads','2026-03-01 12:30:15.250000',7);
CREATE TABLE idempotent_requests (
	digest BLOB NOT NULL, 
	body_digest BLOB NOT NULL, 
	lease_until DATETIME, 
	fence BIGINT NOT NULL, 
	status INTEGER, 
	answer TEXT, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_idempotent_requests PRIMARY KEY (digest)
);
INSERT INTO "idempotent_requests" VALUES(X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F','2026-03-01 12:30:15.250000',7,200,'{"a":[1,"b",null]}','2026-03-01 12:30:15.250000');
CREATE TABLE job_log (
	job_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	worker TEXT, 
	percent INTEGER, 
	level TEXT, 
	text TEXT NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_job_log PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_job_log_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_log" VALUES('jobs-1',7,'started',7,'worker of job_log',7,'level of job_log','text of job_log','2026-03-01 12:30:15.250000');
CREATE TABLE job_signals (
	job_id TEXT NOT NULL, 
	"key" TEXT NOT NULL, 
	data TEXT, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_job_signals PRIMARY KEY (job_id, "key"), 
	CONSTRAINT fk_job_signals_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "job_signals" VALUES('jobs-1','data:go','{"a":[1,"b",null]}','2026-03-01 12:30:15.250000');
CREATE TABLE jobs (
	id TEXT NOT NULL, 
	type TEXT NOT NULL, 
	task_id TEXT NOT NULL, 
	plugin_key TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	state TEXT NOT NULL, 
	on_crash TEXT NOT NULL, 
	percent INTEGER NOT NULL, 
	message TEXT NOT NULL, 
	data TEXT, 
	args TEXT, 
	attempt INTEGER NOT NULL, 
	fence BIGINT NOT NULL, 
	worker TEXT, 
	lease_until DATETIME, 
	cancel_requested_at DATETIME, 
	published_at DATETIME, 
	created_at DATETIME NOT NULL, 
	started_at DATETIME, 
	updated_at DATETIME NOT NULL, 
	finished_at DATETIME, call_id TEXT, round_id TEXT, turn_id TEXT, retry_of TEXT, 
	CONSTRAINT pk_jobs PRIMARY KEY (id)
);
INSERT INTO "jobs" VALUES('jobs-1','index','task-1','author.plugin','chat-1','running','restart',7,'message of jobs','{"a":[1,"b",null]}','{"a":[1,"b",null]}',7,7,'worker of jobs','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','calls-1','rounds-1','rounds-1','retry_of of jobs');
CREATE TABLE key_storage (
	id TEXT NOT NULL, 
	key_id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_key_storage PRIMARY KEY (id)
);
INSERT INTO "key_storage" VALUES('messages:api_keys-1:2026-03-01','api_keys-1','messages',7,'2026-03-01 12:30:15.250000');
CREATE TABLE key_turns (
	turn_id TEXT NOT NULL, 
	key_id TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_key_turns PRIMARY KEY (turn_id)
);
INSERT INTO "key_turns" VALUES('rounds-1','api_keys-1','2026-03-01 12:30:15.250000');
CREATE TABLE leases (
	name TEXT NOT NULL, 
	owner TEXT, 
	lease_until DATETIME, 
	fence BIGINT NOT NULL, 
	CONSTRAINT pk_leases PRIMARY KEY (name)
);
INSERT INTO "leases" VALUES('sweep','owner of leases','2026-03-01 12:30:15.250000',7);
CREATE TABLE mcp_servers (
	name TEXT NOT NULL, 
	declaration TEXT, 
	is_enabled BOOLEAN NOT NULL, 
	listed_digest TEXT, 
	tools TEXT, 
	about TEXT, 
	listed_at DATETIME, 
	error TEXT, 
	revision INTEGER NOT NULL, 
	updated_at DATETIME NOT NULL, 
	sampled_on TEXT, 
	sampled_tokens BIGINT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_mcp_servers PRIMARY KEY (name)
);
INSERT INTO "mcp_servers" VALUES('files','{"a":[1,"b",null]}',1,'listed_digest of mcp_servers','[]','{"a":[1,"b",null]}','2026-03-01 12:30:15.250000','error of mcp_servers',7,'2026-03-01 12:30:15.250000',NULL,0);
CREATE TABLE messages (
	sequence INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	sender_id TEXT, 
	sender_name TEXT, 
	text TEXT NOT NULL, 
	data TEXT, 
	call_id TEXT, 
	round_id TEXT, 
	plugin_key TEXT, 
	once_key TEXT, 
	created_at DATETIME NOT NULL, turn_id TEXT, 
	CONSTRAINT fk_messages_chat_key FOREIGN KEY(chat_key) REFERENCES chats (chat_key) ON DELETE CASCADE, 
	CONSTRAINT uq_messages_id UNIQUE (id), 
	CONSTRAINT uq_messages_once_key UNIQUE (once_key)
);
INSERT INTO "messages" VALUES(1,'messages-1','chat-1','user','user-1','sender_name of messages','nul ﷐0000 and surrogate ﷐dc80 and ﷐fdd0','{"a":[1,"b",null]}','calls-1','rounds-1','author.plugin','once_key of messages','2026-03-01 12:30:15.250000','rounds-1');
CREATE TABLE method_marks (
	method TEXT NOT NULL, 
	lane TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	source TEXT NOT NULL, 
	marked_at DATETIME NOT NULL, 
	CONSTRAINT pk_method_marks PRIMARY KEY (method)
);
INSERT INTO "method_marks" VALUES('author.plugin.pay','methods','reason of method_marks','watchdog','2026-03-01 12:30:15.250000');
CREATE TABLE openai_responses (
	id TEXT NOT NULL, 
	key_id TEXT, 
	chat_key TEXT NOT NULL, 
	turn_id TEXT, 
	previous_id TEXT, 
	model TEXT NOT NULL, 
	is_background BOOLEAN NOT NULL, 
	stated TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_openai_responses PRIMARY KEY (id)
);
INSERT INTO "openai_responses" VALUES('openai_responses-1','api_keys-1','chat-1','rounds-1','previous_id of openai_responses','model of openai_responses',1,'{"a":[1,"b",null]}','2026-03-01 12:30:15.250000');
CREATE TABLE plugin_snapshots (
	digest TEXT NOT NULL, 
	plugin_key TEXT NOT NULL, 
	entry TEXT NOT NULL, 
	published_at DATETIME NOT NULL, 
	CONSTRAINT pk_plugin_snapshots PRIMARY KEY (digest)
);
INSERT INTO "plugin_snapshots" VALUES('plugin_snapshots-1','author.plugin','{}','2026-03-01 12:30:15.250000');
CREATE TABLE plugin_states (
	plugin_key TEXT NOT NULL, 
	is_enabled BOOLEAN NOT NULL, 
	revision INTEGER NOT NULL, 
	announced_revision INTEGER NOT NULL, 
	changed_at DATETIME NOT NULL, 
	CONSTRAINT pk_plugin_states PRIMARY KEY (plugin_key)
);
INSERT INTO "plugin_states" VALUES('author.plugin',1,7,7,'2026-03-01 12:30:15.250000');
CREATE TABLE plugin_values (
	digest BLOB NOT NULL, 
	plugin_key TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	user_key TEXT NOT NULL, 
	store_key TEXT NOT NULL, 
	value TEXT NOT NULL, 
	revision BIGINT NOT NULL, 
	created_at DATETIME NOT NULL, 
	updated_at DATETIME NOT NULL, 
	CONSTRAINT pk_plugin_values PRIMARY KEY (digest)
);
INSERT INTO "plugin_values" VALUES(X'2B4BC0963C560425CF16514D460E5B000A0CD5EBD639189BB714C0A2A84AB60E','author.plugin','chat-1','user_key of plugin_values','store_key of plugin_values','stored',1,'2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000');
CREATE TABLE presets (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	name TEXT NOT NULL, 
	title TEXT NOT NULL, 
	avatar TEXT NOT NULL, 
	content TEXT NOT NULL, 
	description TEXT NOT NULL, 
	tags TEXT NOT NULL, 
	author TEXT NOT NULL, 
	remote_id TEXT, 
	on_shared BOOLEAN NOT NULL, 
	ext_data TEXT, 
	created_at DATETIME NOT NULL, 
	updated_at DATETIME NOT NULL
, once_key TEXT);
INSERT INTO "presets" VALUES(1,'Nomen 😀','title of presets','avatar of presets','content of presets','description of presets','tags of presets','author of presets','remote_id of presets',1,'{"a":[1,"b",null]}','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','once_key of presets');
CREATE TABLE round_prompts (
	round_id TEXT NOT NULL, 
	prompt TEXT NOT NULL, 
	sent_at DATETIME NOT NULL, 
	CONSTRAINT pk_round_prompts PRIMARY KEY (round_id), 
	CONSTRAINT fk_round_prompts_round_id_rounds FOREIGN KEY(round_id) REFERENCES rounds (id) ON DELETE CASCADE
);
INSERT INTO "round_prompts" VALUES('rounds-1','prompt of round_prompts','2026-03-01 12:30:15.250000');
CREATE TABLE rounds (
	sequence INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	turn_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	trigger_kind TEXT NOT NULL, 
	trigger_id TEXT NOT NULL, 
	state TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	fence BIGINT NOT NULL, 
	worker TEXT, 
	merged_into TEXT, 
	requested_at DATETIME NOT NULL, 
	not_before DATETIME NOT NULL, 
	started_at DATETIME, 
	finished_at DATETIME, 
	cancel_requested_at DATETIME, 
	user_id TEXT, 
	observation TEXT, 
	segments TEXT, 
	prompt_chars INTEGER, 
	model TEXT, 
	answer TEXT, 
	answered_at DATETIME, 
	code TEXT, 
	stop_type INTEGER, 
	exit_code INTEGER, 
	output TEXT, 
	prompt_tokens INTEGER, 
	completion_tokens INTEGER, 
	cost DOUBLE, 
	error TEXT, calls TEXT, root_turn_id TEXT, turn_state TEXT, turn_cost DOUBLE, tokens_estimated BOOLEAN, 
	CONSTRAINT fk_rounds_chat_key FOREIGN KEY(chat_key) REFERENCES chats (chat_key) ON DELETE CASCADE, 
	CONSTRAINT uq_rounds_id UNIQUE (id)
);
INSERT INTO "rounds" VALUES(1,'rounds-1','chat-1','rounds-1',1,'message','trigger_id of rounds','done',7,7,'worker of rounds',NULL,'2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','user-1','observation of rounds','[{"type":"text","text":"hi"}]',7,'m','answer of rounds','2026-03-01 12:30:15.250000','code of rounds',0,7,'output of rounds',7,7,0.125,'error of rounds','[{"method":"author.plugin.pay","seconds":0.5}]','rounds-1','done',0.125,1);
CREATE TABLE spending_totals (
	scope TEXT NOT NULL, 
	period TEXT NOT NULL, 
	id TEXT NOT NULL, 
	tokens BIGINT NOT NULL, 
	cost DOUBLE NOT NULL, 
	rounds BIGINT NOT NULL, 
	sandbox_seconds DOUBLE NOT NULL, 
	warned TEXT NOT NULL, 
	updated_at DATETIME NOT NULL, estimated_requests BIGINT DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_spending_totals PRIMARY KEY (scope, period, id)
);
INSERT INTO "spending_totals" VALUES('chat','2026-03-01','chat-1',7,0.125,7,0.125,'warned of spending_totals','2026-03-01 12:30:15.250000',7);
CREATE TABLE spendings (
	id TEXT NOT NULL, 
	part INTEGER NOT NULL, 
	day TEXT NOT NULL, 
	chat_key TEXT, 
	user_id TEXT, 
	key_id TEXT, 
	turn_id TEXT, 
	plugin_key TEXT, 
	model_group TEXT NOT NULL, 
	model TEXT NOT NULL, 
	rounds INTEGER NOT NULL, 
	requests INTEGER NOT NULL, 
	prompt_tokens BIGINT NOT NULL, 
	completion_tokens BIGINT NOT NULL, 
	cost DOUBLE NOT NULL, 
	sandbox_seconds DOUBLE NOT NULL, 
	created_at DATETIME NOT NULL, 
	settled_at DATETIME, estimated_requests INTEGER DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_spendings PRIMARY KEY (id, part)
);
INSERT INTO "spendings" VALUES('spendings-1',0,'2026-03-01','chat-1','user-1','api_keys-1','rounds-1','author.plugin','default','model of spendings',7,7,7,7,0.125,0.125,'2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000',7);
CREATE TABLE timers (
	id TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	fire_at DATETIME NOT NULL, 
	description TEXT NOT NULL, 
	"temporary" BOOLEAN NOT NULL, 
	state TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_timers PRIMARY KEY (id), 
	CONSTRAINT fk_timers_chat_key FOREIGN KEY(chat_key) REFERENCES chats (chat_key) ON DELETE CASCADE
);
INSERT INTO "timers" VALUES('timers-1','chat-1','2026-03-01 12:30:15.250000','description of timers',1,'waiting','2026-03-01 12:30:15.250000');
CREATE TABLE turn_terms (
	sequence INTEGER NOT NULL, 
	term TEXT NOT NULL, 
	requested_at DATETIME NOT NULL, 
	CONSTRAINT pk_turn_terms PRIMARY KEY (sequence, term), 
	CONSTRAINT fk_turn_terms_sequence_rounds FOREIGN KEY(sequence) REFERENCES rounds (sequence) ON DELETE CASCADE
);
INSERT INTO "turn_terms" VALUES(1,'model:m','2026-03-01 12:30:15.250000');
CREATE TABLE turn_variables (
	turn_id TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	round_id TEXT NOT NULL, 
	kept TEXT NOT NULL, 
	not_kept TEXT NOT NULL, 
	updated_at DATETIME NOT NULL, 
	CONSTRAINT pk_turn_variables PRIMARY KEY (turn_id), 
	CONSTRAINT fk_turn_variables_chat_key_chats FOREIGN KEY(chat_key) REFERENCES chats (chat_key) ON DELETE CASCADE
);
INSERT INTO "turn_variables" VALUES('rounds-1','chat-1','rounds-1','{"x":"i1"}','["y"]','2026-03-01 12:30:15.250000');
CREATE TABLE upload_areas (
	chat_name TEXT NOT NULL, 
	directory TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_upload_areas PRIMARY KEY (chat_name), 
	CONSTRAINT uq_upload_areas_directory UNIQUE (directory)
);
INSERT INTO "upload_areas" VALUES('chat_name of upload_areas','~0123456789abcdef','2026-03-01 12:30:15.250000');
CREATE TABLE users (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	adapter_key TEXT NOT NULL, 
	platform_userid TEXT NOT NULL, 
	username TEXT NOT NULL, 
	perm_level INTEGER NOT NULL, 
	ban_until DATETIME, 
	prevent_trigger_until DATETIME, 
	ext_data TEXT, 
	created_at DATETIME NOT NULL, 
	updated_at DATETIME NOT NULL
);
INSERT INTO "users" VALUES(1,'onebot_v11','user-1','username of users',7,'2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000','{"a":[1,"b",null]}','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000');
CREATE TABLE webhook_cursors (
	webhook_id TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	CONSTRAINT pk_webhook_cursors PRIMARY KEY (webhook_id, chat_key), 
	CONSTRAINT fk_webhook_cursors_webhook_id FOREIGN KEY(webhook_id) REFERENCES webhooks (id) ON DELETE CASCADE, 
	CONSTRAINT fk_webhook_cursors_chat_key FOREIGN KEY(chat_key) REFERENCES chats (chat_key) ON DELETE CASCADE
);
INSERT INTO "webhook_cursors" VALUES('webhooks-1','chat-1',7);
CREATE TABLE webhook_deliveries (
	id TEXT NOT NULL, 
	webhook_id TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	type TEXT NOT NULL, 
	body TEXT NOT NULL, 
	state TEXT NOT NULL, 
	attempts INTEGER NOT NULL, 
	due_at DATETIME NOT NULL, 
	status INTEGER, 
	error TEXT, 
	created_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	CONSTRAINT pk_webhook_deliveries PRIMARY KEY (id), 
	CONSTRAINT fk_webhook_deliveries_webhook_id FOREIGN KEY(webhook_id) REFERENCES webhooks (id) ON DELETE CASCADE
);
INSERT INTO "webhook_deliveries" VALUES('webhook_deliveries-1','webhooks-1','chat-1',7,'type of webhook_deliveries','body of webhook_deliveries','waiting',7,'2026-03-01 12:30:15.250000',7,'error of webhook_deliveries','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000');
CREATE TABLE webhooks (
	id TEXT NOT NULL, 
	url TEXT NOT NULL, 
	description TEXT NOT NULL, 
	events TEXT NOT NULL, 
	chats TEXT NOT NULL, 
	secret_version INTEGER NOT NULL, 
	is_active BOOLEAN NOT NULL, 
	fault TEXT, 
	created_at DATETIME NOT NULL, 
	updated_at DATETIME NOT NULL, 
	CONSTRAINT pk_webhooks PRIMARY KEY (id)
);
INSERT INTO "webhooks" VALUES('webhooks-1','url of webhooks','description of webhooks','["message.*"]','*',7,1,'fault of webhooks','2026-03-01 12:30:15.250000','2026-03-01 12:30:15.250000');
CREATE TABLE worker_plugins (
	worker_id TEXT NOT NULL, 
	position INTEGER NOT NULL, 
	digest TEXT NOT NULL, 
	CONSTRAINT pk_worker_plugins PRIMARY KEY (worker_id, position)
);
INSERT INTO "worker_plugins" VALUES('workers-1',0,'plugin_snapshots-1');
CREATE TABLE worker_sites (
	worker_id TEXT NOT NULL, 
	plugin_key TEXT NOT NULL, 
	address TEXT NOT NULL, 
	CONSTRAINT pk_worker_sites PRIMARY KEY (worker_id, plugin_key)
);
INSERT INTO "worker_sites" VALUES('workers-1','author.plugin','10.0.0.1:8080');
CREATE TABLE worker_timers (
	id TEXT NOT NULL, 
	worker_id TEXT NOT NULL, 
	plugin_key TEXT NOT NULL, 
	chat_key TEXT NOT NULL, 
	fire_at DATETIME NOT NULL, 
	description TEXT NOT NULL, 
	"temporary" BOOLEAN NOT NULL, 
	CONSTRAINT pk_worker_timers PRIMARY KEY (id)
);
INSERT INTO "worker_timers" VALUES('worker_timers-1','workers-1','author.plugin','chat-1','2026-03-01 12:30:15.250000','description of worker_timers',1);
CREATE TABLE workers (
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	lane TEXT NOT NULL, 
	host TEXT NOT NULL, 
	pid INTEGER NOT NULL, 
	started_at DATETIME NOT NULL, 
	owner TEXT, 
	lease_until DATETIME, 
	fence BIGINT NOT NULL, release TEXT, 
	CONSTRAINT pk_workers PRIMARY KEY (id)
);
INSERT INTO "workers" VALUES('workers-1','Nomen 😀','methods','host-1',7,'2026-03-01 12:30:15.250000','owner of workers','2026-03-01 12:30:15.250000',7,'release of workers');
CREATE INDEX ix_plugin_values_plugin_key ON plugin_values (plugin_key);
CREATE INDEX ix_chats_shared_used_at ON chats (shared_used_at);
CREATE INDEX ix_messages_chat_key_sequence ON messages (chat_key, sequence);
CREATE INDEX ix_messages_created_at ON messages (created_at);
CREATE INDEX ix_rounds_chat_key_sequence ON rounds (chat_key, sequence);
CREATE INDEX ix_rounds_finished_at ON rounds (finished_at);
CREATE INDEX ix_rounds_merged_into ON rounds (merged_into);
CREATE INDEX ix_rounds_open ON rounds (chat_key, not_before) WHERE state IN ('requested', 'running');
CREATE INDEX ix_rounds_turn_id ON rounds (turn_id);
CREATE UNIQUE INDEX uq_rounds_running ON rounds (chat_key) WHERE state = 'running';
CREATE UNIQUE INDEX uq_rounds_trigger_kind_trigger_id ON rounds (trigger_kind, trigger_id);
CREATE INDEX ix_calls_finished_at ON calls (finished_at);
CREATE INDEX ix_calls_open ON calls (requested_at) WHERE state IN ('queued', 'running');
CREATE INDEX ix_calls_round_id ON calls (round_id);
CREATE INDEX ix_timers_chat_key ON timers (chat_key);
CREATE INDEX ix_timers_state_fire_at ON timers (state, fire_at);
CREATE INDEX ix_cron_jobs_chat_key ON cron_jobs (chat_key);
CREATE INDEX ix_cron_jobs_next_fire_at ON cron_jobs (next_fire_at);
CREATE INDEX ix_jobs_chat_key ON jobs (chat_key);
CREATE INDEX ix_jobs_updated_at ON jobs (updated_at);
CREATE UNIQUE INDEX uq_jobs_open ON jobs (plugin_key, type, task_id) WHERE state IN ('queued', 'running');
CREATE INDEX ix_downloads_updated_at ON downloads (updated_at);
CREATE UNIQUE INDEX uq_users_platform_userid_adapter_key ON users (platform_userid, adapter_key);
CREATE INDEX ix_worker_plugins_digest ON worker_plugins (digest);
CREATE INDEX ix_messages_turn_id ON messages (turn_id);
CREATE INDEX ix_jobs_turn_id ON jobs (turn_id);
CREATE INDEX ix_chat_events_turn_id ON chat_events (turn_id);
CREATE INDEX ix_chat_events_created_at ON chat_events (created_at);
CREATE INDEX ix_key_turns_key_id_created_at ON key_turns (key_id, created_at);
CREATE INDEX ix_key_turns_created_at ON key_turns (created_at);
CREATE INDEX ix_idempotent_requests_created_at ON idempotent_requests (created_at);
CREATE INDEX ix_audit_at ON audit (at);
CREATE INDEX ix_adapter_clients_seen_at ON adapter_clients (seen_at);
CREATE INDEX ix_adapter_sends_finished_at ON adapter_sends (finished_at);
CREATE INDEX ix_adapter_sends_open ON adapter_sends (channel_id, sequence) WHERE state IN ('waiting', 'sent');
CREATE INDEX ix_webhook_deliveries_finished_at ON webhook_deliveries (finished_at);
CREATE INDEX ix_webhook_deliveries_webhook_id_created_at ON webhook_deliveries (webhook_id, created_at);
CREATE INDEX ix_webhook_deliveries_open ON webhook_deliveries (due_at) WHERE state = 'waiting';
CREATE INDEX ix_openai_responses_created_at ON openai_responses (created_at);
CREATE INDEX ix_approvals_decided_at ON approvals (decided_at);
CREATE INDEX ix_approvals_root_turn_id ON approvals (root_turn_id);
CREATE INDEX ix_approvals_chat_key_sequence ON approvals (chat_key, sequence);
CREATE INDEX ix_approvals_pending ON approvals (expires_at) WHERE state = 'pending';
CREATE INDEX ix_approvals_granted ON approvals (chat_key, method) WHERE state = 'approved' AND scope IN ('turn', 'chat');
CREATE INDEX ix_spendings_created_at ON spendings (created_at);
CREATE INDEX ix_spendings_day ON spendings (day);
CREATE INDEX ix_spending_totals_updated_at ON spending_totals (updated_at);
CREATE INDEX ix_chat_summaries_oldest_at ON chat_summaries (oldest_at);
CREATE INDEX ix_turn_variables_chat_key ON turn_variables (chat_key);
CREATE INDEX ix_turn_variables_updated_at ON turn_variables (updated_at);
CREATE INDEX ix_worker_timers_worker_id ON worker_timers (worker_id);
CREATE INDEX ix_key_storage_kind ON key_storage (kind, created_at);
CREATE UNIQUE INDEX uq_presets_once_key ON presets (once_key);
CREATE INDEX ix_round_prompts_sent_at ON round_prompts (sent_at);
CREATE INDEX ix_rounds_turns ON rounds (requested_at, sequence, chat_key, turn_cost) WHERE id = turn_id;
CREATE INDEX ix_rounds_turn_state ON rounds (turn_state, requested_at, sequence) WHERE id = turn_id;
CREATE INDEX ix_turn_terms_term ON turn_terms (term, requested_at, sequence);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('users',1);
INSERT INTO "sqlite_sequence" VALUES('adapter_sends',1);
INSERT INTO "sqlite_sequence" VALUES('audit',1);
INSERT INTO "sqlite_sequence" VALUES('presets',1);
INSERT INTO "sqlite_sequence" VALUES('approvals',1);
INSERT INTO "sqlite_sequence" VALUES('messages',1);
INSERT INTO "sqlite_sequence" VALUES('rounds',1);
COMMIT;
